"""Explains why the handshake of a broker and a client fails, from the events of ZeroMQ's monitor.

ZeroMQ retries or gives up without reporting an error: without this module a missing key would look like
a broker that is not running.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from diloco_protocol.clients.greeting import asks_for_keys
from diloco_protocol.clients.keys import VARIABLE, Keys
from diloco_protocol.clients.mistaken_address import Mistaken, is_a_feed

# Monitor events of a failed handshake.
FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
# Monitor events that `Handshakes` needs.
EXPLAINED = FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


@dataclass(frozen=True)
class Failure:
    """Why a handshake failed, a sentence. If it `is_final`, a retry cannot succeed.

    `meant` is the correct address, if the address of the broker's other socket was given.
    """

    text: str
    is_final: bool
    meant: str = ""


def failure(event: int, address: str, *, has_keys: bool) -> Failure | None:
    """The failure that a monitor event reports; None for other events.

    If the event does not have the reason, the peer is queried, which takes at most 0.5 s.
    """
    if not event & FAILURES:
        return None
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Failure(
            "The broker rejected the key: it was revoked, or made for another broker; "
            "diloco-broker keygen makes a new one.",
            is_final=True,
        )
    is_clear = event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    if not is_clear and asks_for_keys(address) is not (not has_keys):
        return Failure(
            "The peer closes the connection at once: it is a broker that requires a key or another "
            "key (--keys), or a tunnel without a running broker behind it.",
            is_final=False,
        )
    if not has_keys:
        return Failure(
            "The broker requires a key; give the key file that diloco-broker keygen made "
            f"(--keys FILE, keys=, or {VARIABLE}=FILE).",
            is_final=True,
        )
    return Failure(
        "The broker uses no keys, but a key was given; check that the address is correct and that the "
        "broker was started with --keys.",
        is_final=True,
    )


class Handshakes:
    """Explains each failed handshake of a socket, from the events of its monitor in order.

    If the peer ends a handshake without a reason, `mistaken` checks whether the address belongs to the
    broker's other socket, which blocks for at most 2 s.
    """

    def __init__(self, address: str, keys: Keys | None, mistaken: Mistaken = is_a_feed) -> None:
        self._address, self._keys, self._mistaken = address, keys, mistaken
        self._is_up = False

    def failure(self, event: int) -> Failure | None:
        """The failure of the handshake that ends with this event; None for other events."""
        was_up, self._is_up = self._is_up, event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        found = failure(event, self._address, has_keys=self._keys is not None)
        # Without keys ZeroMQ reports a socket of the wrong type only as a disconnection.
        is_ended = event == zmq.EVENT_DISCONNECTED and not was_up
        if is_ended or (found is not None and not found.is_final):
            mistake = self._mistaken(self._address, self._keys)
            if mistake is not None:
                return Failure(mistake.text, is_final=True, meant=mistake.meant)
        return found


class HandshakeMonitor:
    """Monitors the handshakes of a socket; create it before the socket connects."""

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
        self.has_disconnected = False  # since the caller reset it
        self.failure: str | None = None  # of the last handshake; None if it succeeded
        self.meant = ""  # as in `Failure`

    def look(self) -> bool:
        """Read the events. Returns whether a handshake failed for good."""
        while self.socket.poll(0):
            event: int = parse_monitor_message(self.socket.recv_multipart())["event"]
            found = self._handshakes.failure(event)
            self.has_disconnected |= event == zmq.EVENT_DISCONNECTED
            if found is None and event == zmq.EVENT_DISCONNECTED:
                continue  # the reason, if any, came before
            self.failure = None if found is None else found.text
            self.meant = "" if found is None else found.meant
            self._count = 0 if found is None or found.is_final else self._count + 1
            if found is not None and found.is_final:
                return True
        return False

    @property
    def is_worth_telling(self) -> bool:
        """Whether the handshake has failed three times without a final reason; ZeroMQ keeps retrying.

        A broker that is killed during a handshake causes one such failure.
        """
        return self._count >= 3

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close(linger=0)
