"""A process that does nothing but answer each byte: how long anybody has to wait on this machine now.

python -m diloco_lab.chaos.attacks.echo
"""

from __future__ import annotations

import socket

from diloco_tools.tcp_proxy import HOST


def main() -> None:
    """Print the port, and answer one connection until it ends."""
    with socket.create_server((HOST, 0)) as listener:
        print("port", listener.getsockname()[1], flush=True)
        near, _ = listener.accept()
        with near:
            while data := near.recv(16):
                near.sendall(data)


if __name__ == "__main__":
    main()
