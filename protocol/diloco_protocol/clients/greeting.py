"""Ask the peer that listens at an address, before any handshake, whether it asks for keys.

A peer of ZMTP 3 (RFC 23) says in its greeting which mechanism it uses, as soon as it has seen that we
speak that version too. Where the mechanisms differ both ends close the connection, and the one that is
quicker leaves the other without a reason: on a busy machine a client may not learn it for a long time.
This end says nothing of its own mechanism, so it is always told.
"""

from __future__ import annotations

import socket
import time

# The signature, and the major version.
BEGINNING = b"\xff" + bytes(8) + b"\x7f\x03"
GREETING_BYTES = 64
MECHANISM = slice(12, 32)
ANSWERS_WITHIN_S = 0.5


def asks_for_keys(address: str, within_s: float = ANSWERS_WITHIN_S) -> bool | None:
    """Whether a ZeroMQ peer with keys listens there; None where that is not known."""
    until = time.monotonic() + within_s
    try:
        with _connected(address, within_s) as peer:
            peer.sendall(BEGINNING)
            greeting = b""
            while len(greeting) < GREETING_BYTES:
                peer.settimeout(max(0.001, until - time.monotonic()))
                said = peer.recv(GREETING_BYTES - len(greeting))
                if not said:
                    return None
                greeting += said
    except (OSError, ValueError):
        return None
    if greeting[0] != 0xFF or greeting[9] & 1 == 0:
        return None
    return {b"CURVE": True, b"NULL": False}.get(greeting[MECHANISM].rstrip(b"\0"))


def _connected(address: str, within_s: float) -> socket.socket:
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(within_s)
        try:
            made.connect(f"\0{rest[1:]}" if rest.startswith("@") else rest)
        except OSError:
            made.close()
            raise
        return made
    host, _, port = rest.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), within_s)
