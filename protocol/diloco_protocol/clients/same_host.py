"""The Unix socket that a broker offers to workers of its own machine and user: cheaper than TCP.

It is an abstract one (unix(7), Linux alone): a name without a file, which goes with the process.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

ABSTRACT = "ipc://@"  # how ZeroMQ writes it
OWN_SOCKET = f"{ABSTRACT}diloco-"
PROBE_WITHIN_S = 1.0
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group


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
    """Whether a program of this user listens at such a socket of this machine, by the kernel's word.

    What a broker says is not enough: it could name any socket.
    """
    if not address.startswith(OWN_SOCKET) or sys.platform != "linux":
        return False
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(PROBE_WITHIN_S)
            probe.connect("\0" + address.removeprefix(ABSTRACT))
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except (OSError, ValueError):
        return False
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())
