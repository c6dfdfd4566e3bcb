"""Recognize a mistaken address: the feed's instead of the control address, the reverse, a misspelt name.

ZeroMQ closes a connection between incompatible socket types without a reason; over CURVE even the type
is encrypted. So these functions connect with the type that fits the other address.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from diloco_protocol.addresses import as_reached
from diloco_protocol.clients.keys import Keys
from diloco_protocol.errors import ProtocolError
from diloco_protocol.feed import MAX_SNAPSHOT_BYTES, TOPIC, FeedError, parse_snapshot
from diloco_protocol.frames import pack, unpack
from diloco_protocol.messages import Control, Result

HANDSHAKE_WITHIN_S = 0.5
ANSWER_WITHIN_S = 1.5  # seconds; the feed publishes once a second
_ENDS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


@dataclass(frozen=True)
class Mistake:
    """The given address belongs to the broker's other socket."""

    text: str  # a sentence
    meant: str  # the correct address; empty if the broker does not report it


# Takes address and keys; returns None if the address does not belong to the other socket.
Mistaken = Callable[[str, Keys | None], Mistake | None]


def is_a_feed(address: str, keys: Keys | None = None) -> Mistake | None:
    """Find out whether the address of a feed was given as the control address.

    Takes at most `HANDSHAKE_WITHIN_S`, plus `ANSWER_WITHIN_S` if a feed publishes there.
    """
    found = _heard(zmq.SUB, address, keys, lambda frames: parse_snapshot(frames[0]).control)
    return None if found is None else _mistake("feed address", "control address", address, found)


def is_a_control_address(address: str, keys: Keys | None = None) -> Mistake | None:
    """Find out whether the control address was given as that of the feed.

    Takes as long as `is_a_feed`.
    """

    def feed_of(frames: list[bytes]) -> object:
        answer = unpack(frames)[0]
        return answer.data.get("feed_address") if isinstance(answer, Result) else None

    found = _heard(zmq.DEALER, address, keys, feed_of)
    return None if found is None else _mistake("control address", "feed address", address, found)


def _heard(
    kind: int, address: str, keys: Keys | None, read: Callable[[list[bytes]], object]
) -> str | None:
    """What the peer says of its other address, empty if nothing; None if it has another socket type."""
    with _connected(kind, address, keys) as peer:
        if peer is None:
            return None
        if kind == zmq.DEALER:
            peer.send_multipart(pack(Control("status", 1)))
        frames = peer.recv_multipart() if peer.poll(int(1000 * ANSWER_WITHIN_S)) else None
    with suppress(FeedError, ProtocolError):
        found = "" if frames is None else read(frames)
        return found if isinstance(found, str) else ""
    return ""


def _mistake(found: str, wanted: str, address: str, bound: str) -> Mistake:
    """`bound`: bound address of the correct socket, as the broker reports it; empty if unknown."""
    meant = as_reached(bound, address) if bound else ""
    advice = f"its {wanted} is {meant}" if bound else f"give the {wanted} that it printed"
    return Mistake(f"{address} is the {found} of the broker; {advice}.", meant)


def unknown_name(address: str) -> str | None:
    """The end of a sentence about an unresolvable host name; None if the name can be resolved."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if not address.startswith("tcp://"):
        return None
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return f"the host name {host!r} cannot be resolved; check its spelling."
    return None


@contextmanager
def _connected(kind: int, address: str, keys: Keys | None) -> Iterator[zmq.Socket[Any] | None]:
    """A socket of this type after a successful handshake; None if the handshake failed."""
    with zmq.Context() as context, context.socket(kind) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.IPV6, int("[" in address))
        peer.setsockopt(zmq.MAXMSGSIZE, MAX_SNAPSHOT_BYTES)
        if kind == zmq.SUB:
            peer.setsockopt(zmq.SUBSCRIBE, TOPIC)
        if keys is not None:
            keys.lock(peer)
        monitor: zmq.Socket[Any] = peer.get_monitor_socket(_ENDS)
        try:
            peer.connect(address)
            succeeded = bool(monitor.poll(int(1000 * HANDSHAKE_WITHIN_S))) and (
                parse_monitor_message(monitor.recv_multipart())["event"]
                == zmq.EVENT_HANDSHAKE_SUCCEEDED
            )
            yield peer if succeeded else None
        finally:
            peer.disable_monitor()
            monitor.close(linger=0)
