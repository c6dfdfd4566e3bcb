"""Finds out whether a broker requires keys, from the greeting of its socket, before any handshake.

A ZMTP 3 peer (RFC 23) sends its mechanism in the greeting as soon as we have announced that version. If
the mechanisms differ, both ends close the connection, and if the peer closes first, the client does not
learn the reason; on a busy machine that can repeat for a long time. This code does not send its own
mechanism, so it always receives the peer's.
"""

from __future__ import annotations

import contextlib
import socket
import time

# The signature and the major version of ZMTP 3.
BEGINNING = b"\xff" + bytes(8) + b"\x7f\x03"
GREETING_BYTES = 64
MECHANISM = slice(12, 32)
ANSWERS_WITHIN_S = 0.5


def asks_for_keys(address: str, within_s: float = ANSWERS_WITHIN_S) -> bool | None:
    """Whether the ZeroMQ peer at an address requires keys; None if unknown."""
    until = time.monotonic() + within_s
    try:
        with _connected(address, within_s) as peer:
            return requires_keys(greeting_of(peer, until))
    except (OSError, ValueError):
        return None


def greeting_of(peer: socket.socket, until: float) -> bytes:
    """The first 64 bytes that a peer sends, or fewer where they are not those of ZeroMQ."""
    said = b""
    with contextlib.suppress(OSError):
        peer.sendall(BEGINNING)
        while len(said) < GREETING_BYTES and (left := until - time.monotonic()) > 0:
            peer.settimeout(left)
            piece = peer.recv(GREETING_BYTES - len(said))
            said += piece
            if not piece or said[0] != 0xFF:
                break
    return said


def requires_keys(greeting: bytes) -> bool | None:
    """Whether the peer with this greeting requires keys; None where it is not a ZeroMQ greeting."""
    if len(greeting) < GREETING_BYTES or greeting[0] != 0xFF or greeting[9] & 1 == 0:
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
