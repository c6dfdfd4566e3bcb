"""The socket file that a broker offers to workers on its own machine: what both sides know of it."""

from __future__ import annotations

import os
import socket
import stat

FOLDER = "diloco-"  # how the name of the folder begins that the socket file lies in
LONGEST_PATH = 107  # bytes of a socket's path, on Linux
PROBE_WITHIN_S = 1.0


def leads_to(dialled: str, bound: str) -> bool:
    """Whether a TCP address is that of a broker which is bound so, with nothing in between.

    A broker that is bound to every address of its machine has each that this machine has.
    """
    host, port = _host_and_port(dialled)
    own_host, own_port = _host_and_port(bound)
    if port is None or port != own_port:
        return False
    try:
        found = {
            str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        }
    except OSError:
        return False
    return all(map(_is_ours, found)) if own_host in ("0.0.0.0", "::") else found == {own_host}


def _host_and_port(address: str) -> tuple[str, int | None]:
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    is_port = scheme == "tcp" and port.isascii() and port.isdigit()
    return host.strip("[]"), int(port) if is_port else None


def _is_ours(host: str) -> bool:
    """Whether this machine has that address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def can_be_entered(address: str) -> bool:
    """Whether a socket file is in a private folder of this user, and somebody listens there.

    What a broker says is not enough: it could name any socket of this machine.
    """
    scheme, _, path = address.partition("://")
    folder = os.path.dirname(path)
    if scheme != "ipc" or not os.path.basename(folder).startswith(FOLDER):
        return False
    if not hasattr(socket, "AF_UNIX") or len(os.fsencode(path)) > LONGEST_PATH:
        return False
    try:
        found = os.lstat(folder)
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not is_ours or stat.S_IMODE(found.st_mode) & 0o077:
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(PROBE_WITHIN_S)
            probe.connect(path)
    except (OSError, ValueError):
        return False
    return True
