"""How messages travel between the hub and those behind its relays: see `diloco_protocol.relays`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from diloco_broker.core.effects import Route, Send
from diloco_broker.core.events import Received
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.messages import Chunk, Gone, Message, Via
from diloco_protocol.relays import Cache, first_step, unwrap, way
from diloco_protocol.roles import Peer, Role


class RelayLines:
    """See the head of this module: it knows which chunks of versions each relay has."""

    def __init__(self) -> None:
        self._caches: dict[Route, Cache[bool]] = {}  # by connection of a relay

    def down(self, send: Send) -> tuple[Route, Via, Any] | None:
        """The relay's connection, what goes in front of the message, and its buffer.

        None where the message goes to its receiver directly.
        """
        step = first_step(send.route)
        if step is None:
            return None
        route, who = step
        message, payload = send.message, send.payload
        if isinstance(message, Chunk) and payload is not None:
            cache = self._caches.setdefault(route, Cache())
            if cache.get(message):
                payload = None
            else:
                cache.put(message, True)
        return route, Via(who), payload

    def forget(self, routes: Collection[Route]) -> None:
        """Forget all but these connections."""
        for route in self._caches.keys() - routes:
            del self._caches[route]


def received(
    route: Route, frames: Sequence[Any], peer: Peer | None, longest_header: int
) -> Received:
    """What a relay has sent: a message of its own, or of somebody behind it.

    Where keys are asked for those behind it are workers, whose names the relay vouches for.
    """
    via, message, payload = unwrap(frames, longest_header)
    if via is None:
        return Received(route, message, payload, peer)
    if isinstance(message, Chunk) and payload is None:
        raise ProtocolError(Code.BAD_FRAMES, f"Chunk {message.index} came without a buffer.")
    if peer is not None:
        peer = Peer(Role.WORKER, via.peer or peer.name)
    return Received(way(route, via.who), message, payload, peer)


def ending(route: Route) -> tuple[Route, Message] | None:
    """Whom to tell, and what, so that a connection behind a relay is ended."""
    step = first_step(route)
    return None if step is None else (step[0], Gone(step[1]))
