"""Why a broker and a client do not come together, as ZeroMQ tells the client.

ZeroMQ goes on trying in silence, or gives up in silence: without this a missing key looks like a broker
that is not there.
"""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from diloco_protocol.clients.keys import VARIABLE

# To be watched besides whatever else a client watches.
FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def failure(event: int, *, has_keys: bool) -> str | None:
    """What one event of a monitor says, as a sentence; None for those that are no failure."""
    if not event & FAILURES:
        return None
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return (
            "The broker does not let this key in: it was revoked, or made for another broker; "
            "diloco-broker keygen makes a new one."
        )
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return (
            "Whoever answers there ends the connection at once: a broker that asks for a key or "
            "another one (--keys), or a tunnel behind which no broker runs yet."
        )
    if not has_keys:
        return (
            "The broker asks for a key; give the file that diloco-broker keygen made for you "
            f"(--keys FILE, keys=, or {VARIABLE}=FILE)."
        )
    return "The broker asks for no key; is this the right broker, and was it started with --keys?"


class HandshakeMonitor:
    """Watches a socket that is about to connect."""

    def __init__(self, watched: zmq.Socket[Any], *, has_keys: bool) -> None:
        self._watched, self._has_keys = watched, has_keys
        self.socket: zmq.Socket[Any] = watched.get_monitor_socket(
            FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self._count = 0
        self.failure: str | None = None  # of the last handshake; None where it succeeded

    def look(self) -> bool:
        """Take in what has happened. Returns whether connecting is in vain: trying again cannot help."""
        while self.socket.poll(0):
            event: int = parse_monitor_message(self.socket.recv_multipart())["event"]
            self.failure = failure(event, has_keys=self._has_keys)
            is_unclear = event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            self._count = self._count + 1 if is_unclear else 0
            if self.failure is not None and not is_unclear:
                return True
        return False

    @property
    def is_worth_telling(self) -> bool:
        """Whether the handshake has failed thrice without a reason, which ZeroMQ goes on trying.

        A broker that is killed in a handshake looks the same once.
        """
        return self._count >= 3

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close(linger=0)
