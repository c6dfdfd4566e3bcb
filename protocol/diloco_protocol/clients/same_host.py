"""The Unix socket that a broker offers to workers of its machine and user: it is faster than TCP.

It is an abstract socket (unix(7), Linux only): a name without a file, which disappears with the process.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

ABSTRACT = "ipc://@"  # prefix of abstract sockets in ZeroMQ
OWN_SOCKET = f"{ABSTRACT}diloco-"
PROBE_WITHIN_S = 1.0
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group


def leads_to(dialled: str, bound: str) -> bool:
    """Whether the TCP address `dialled` connects directly to a broker on this machine bound to `bound`.

    A broker bound to all addresses is reached at each address of this machine.
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
    """Whether a process of this user listens at such a socket on this machine, as the kernel reports.

    The broker's own report does not suffice: it could name any socket.
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
