"""Why the handshake of a broker and a client fails, from the events of ZeroMQ's monitor.

ZeroMQ retries, or gives up, and reports no error: without this module a missing key looks like a broker
that does not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from diloco_protocol.clients.greeting import asks_for_keys
from diloco_protocol.clients.keys import VARIABLE, Keys
from diloco_protocol.clients.mistaken_address import Mistaken, is_a_feed

# To be watched besides whatever else a client watches.
FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
# What `Handshakes` must see of a socket.
EXPLAINED = FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


@dataclass(frozen=True)
class Failure:
    """Why a handshake failed, a sentence. Where it `is_final` trying again cannot help.

    `meant` is the broker's other address, where the one of the wrong socket was given and it says so.
    """

    text: str
    is_final: bool
    meant: str = ""


def failure(event: int, address: str, *, has_keys: bool) -> Failure | None:
    """What one event of a monitor says; None for those that are no failure.

    Where the event does not tell, the peer at the address is asked, for half a second at most.
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


class Handshakes:
    """Explains each failed handshake of a socket, from its monitor's events in their order.

    Where the peer ends a handshake without a reason, `mistaken` finds out whether the address belongs to
    the broker's other socket; that blocks for 2 s at most, and only then.
    """

    def __init__(self, address: str, keys: Keys | None, mistaken: Mistaken = is_a_feed) -> None:
        self._address, self._keys, self._mistaken = address, keys, mistaken
        self._is_up = False

    def failure(self, event: int) -> Failure | None:
        """Why the handshake failed that ends with this event; None for any other event."""
        was_up, self._is_up = self._is_up, event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        found = failure(event, self._address, has_keys=self._keys is not None)
        # Without keys ZeroMQ reports a socket of the wrong type as a mere disconnection.
        is_ended = event == zmq.EVENT_DISCONNECTED and not was_up
        if is_ended or (found is not None and not found.is_final):
            mistake = self._mistaken(self._address, self._keys)
            if mistake is not None:
                return Failure(mistake.text, is_final=True, meant=mistake.meant)
        return found


class HandshakeMonitor:
    """Watches a socket that is about to connect."""

    def __init__(
        self,
        watched: zmq.Socket[Any],
        address: str,
        keys: Keys | None,
        mistaken: Mistaken = is_a_feed,
    ) -> None:
        self._watched = watched
        self._handshakes = Handshakes(address, keys, mistaken)
        self.socket: zmq.Socket[Any] = watched.get_monitor_socket(EXPLAINED)
        self._count = 0
        self.has_disconnected = False  # since the caller last reset it
        self.failure: str | None = None  # of the last handshake; None where it succeeded
        self.meant = ""  # the address that was meant, as of `Failure`

    def look(self) -> bool:
        """Read the events. Returns whether a handshake failed for a reason that a retry cannot mend."""
        while self.socket.poll(0):
            event: int = parse_monitor_message(self.socket.recv_multipart())["event"]
            found = self._handshakes.failure(event)
            self.has_disconnected |= event == zmq.EVENT_DISCONNECTED
            if found is None and event == zmq.EVENT_DISCONNECTED:
                continue  # it says nothing new: the reason, if any, came before
            self.failure = None if found is None else found.text
            self.meant = "" if found is None else found.meant
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
