"""The socket file that a broker offers to workers on its own machine: what both sides know of it."""

from __future__ import annotations

import os
import socket
import stat

FOLDER = "diloco-"  # how the name of the folder begins that the socket file lies in
LONGEST_PATH = 107  # bytes of a socket's path, on Linux
PROBE_WITHIN_S = 1.0


def port_of(address: str) -> int | None:
    """The port of a TCP address; None of another, or where it has none."""
    scheme, _, rest = address.partition("://")
    port = rest.rpartition(":")[2]
    return int(port) if scheme == "tcp" and port.isascii() and port.isdigit() else None


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
