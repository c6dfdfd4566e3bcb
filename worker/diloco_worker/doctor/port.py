"""Does the name resolve, is the port open, does ZeroMQ answer there, and does it ask for keys?

ZeroMQ tells none of it: it goes on trying in silence. So this says the greeting of ZMTP by itself, and
hears the other's (64 bytes, in which the mechanism stands: https://rfc.zeromq.org/spec/23/).
"""

from __future__ import annotations

import contextlib
import socket
import time

from diloco_worker.doctor.faults import Fault, Found

GREETING_BYTES = 64
_MECHANISM = slice(12, 32)
# Up to the version: libzmq answers with its mechanism, and goes without a word if ours is another.
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"


def asks_for_keys(host: str, port: int, within_s: float) -> bool:
    """Does the broker that listens there ask for keys?

    Raises:
        Found: nobody listens there, or no broker.
    """
    where = f"{host}:{port}"
    try:
        socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        text = (
            f"The name {host} is not known on this machine; check the spelling, DNS or /etc/hosts."
        )
        raise Found(Fault.NAME, text) from None
    try:
        connection = socket.create_connection((host.strip("[]"), port), within_s)
    except ConnectionRefusedError:
        raise Found(
            Fault.PORT,
            f"Nobody listens at {where}; start diloco-broker serve there, or give the control address "
            "that it printed.",
        ) from None
    except OSError as error:
        why = f"within {within_s:g} s" if isinstance(error, TimeoutError) else f"({error.strerror})"
        raise Found(
            Fault.PORT,
            f"{where} cannot be reached {why}; is the machine on, and does its firewall let port {port} "
            "through?",
        ) from None
    with contextlib.closing(connection):
        greeting = _greeting_of(connection, time.monotonic() + within_s)
    if len(greeting) < GREETING_BYTES or greeting[0] != 0xFF or not greeting[9] & 1:
        said = "says nothing" if not greeting else "speaks another protocol"
        raise Found(
            Fault.NOT_A_BROKER,
            f"What listens at {where} is no diloco-broker: it {said}; give the control address that "
            "diloco-broker serve printed.",
        )
    return greeting[_MECHANISM].rstrip(b"\0") == b"CURVE"


def _greeting_of(connection: socket.socket, until: float) -> bytes:
    """What it says first, 64 bytes or as many as come."""
    said = b""
    with contextlib.suppress(OSError):
        connection.sendall(_GREETING)
        while len(said) < GREETING_BYTES and (left := until - time.monotonic()) > 0:
            connection.settimeout(left)
            piece = connection.recv(GREETING_BYTES - len(said))
            if not piece:
                break
            said += piece
            if said[0] != 0xFF:
                break
    return said
