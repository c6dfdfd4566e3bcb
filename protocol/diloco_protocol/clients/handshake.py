"""Why a broker and a client do not come together, as ZeroMQ tells the client.

ZeroMQ goes on trying in silence, or gives up in silence: without this a missing key looks like a broker
that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from diloco_protocol.clients.greeting import asks_for_keys
from diloco_protocol.clients.keys import VARIABLE

# To be watched besides whatever else a client watches.
FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True)
class Failure:
    """Why a handshake failed, a sentence. Where it `is_final` trying again cannot help."""

    text: str
    is_final: bool


def failure(event: int, address: str, *, has_keys: bool) -> Failure | None:
    """What one event of a monitor says; None for those that are no failure.

    Where the event does not tell, whoever is at the address is asked, for half a second at most.
    """
    if not event & FAILURES:
        return None
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Failure(
            "The broker does not let this key in: it was revoked, or made for another broker; "
            "diloco-broker keygen makes a new one.",
            is_final=True,
        )
    is_clear = event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    if not is_clear and asks_for_keys(address) is not (not has_keys):
        return Failure(
            "Whoever answers there ends the connection at once: a broker that asks for a key or "
            "another one (--keys), or a tunnel behind which no broker runs yet.",
            is_final=False,
        )
    if not has_keys:
        return Failure(
            "The broker asks for a key; give the file that diloco-broker keygen made for you "
            f"(--keys FILE, keys=, or {VARIABLE}=FILE).",
            is_final=True,
        )
    return Failure(
        "The broker asks for no key; is this the right broker, and was it started with --keys?",
        is_final=True,
    )


class HandshakeMonitor:
    """Watches a socket that is about to connect."""

    def __init__(self, watched: zmq.Socket[Any], address: str, *, has_keys: bool) -> None:
        self._watched, self._address, self._has_keys = watched, address, has_keys
        self.socket: zmq.Socket[Any] = watched.get_monitor_socket(
            FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self._count = 0
        self.failure: str | None = None  # of the last handshake; None where it succeeded

    def look(self) -> bool:
        """Take in what has happened. Returns whether connecting is in vain: trying again cannot help."""
        while self.socket.poll(0):
            event: int = parse_monitor_message(self.socket.recv_multipart())["event"]
            found = failure(event, self._address, has_keys=self._has_keys)
            self.failure = None if found is None else found.text
            self._count = 0 if found is None or found.is_final else self._count + 1
            if found is not None and found.is_final:
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
