"""A server that is not a broker."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager


@contextmanager
def other_server(says: bytes | None) -> Iterator[str]:
    """Its host and port. It sends these bytes to each connection, or closes each at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = threading.Event()

        def serve(connection: socket.socket) -> None:
            with closing(connection):
                if says is not None:
                    connection.sendall(says)
                    ends.wait(30)

        def accept() -> None:
            while not ends.is_set():
                try:
                    serve(server.accept()[0])
                except OSError:  # the server or the peer has closed
                    continue

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            ends.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)
