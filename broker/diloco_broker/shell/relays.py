"""How messages travel between the hub and those behind its relays: see `diloco_protocol.relays`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from diloco_broker.core.effects import Route, Send
from diloco_broker.core.events import Malformed, Received
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.frames import LONGEST_OF_A_MEMBER, unpack
from diloco_protocol.messages import Chunk, Gone, Message, Via
from diloco_protocol.relays import Cache, first_step, read, unwrap, way
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


def received(route: Route, frames: Sequence[Any], peer: Peer | None) -> Received | Malformed:
    """What a relay has sent: a message of its own, or of somebody behind it.

    Where keys are asked for those behind it are workers, whose names the relay vouches for. Raises
    ProtocolError where it is the relay's own mistake.
    """
    via, frames = unwrap(frames)
    if via is None:
        return Received(route, *unpack(frames, LONGEST_OF_A_MEMBER), peer)
    route = way(route, via.who)
    if peer is not None:
        peer = Peer(Role.WORKER, via.peer or peer.name)
    try:
        message, payload = read(frames, LONGEST_OF_A_MEMBER, via.held)
    except ProtocolError as error:
        return Malformed(route, error.code, str(error))
    if isinstance(message, Chunk) and payload is None:
        return Malformed(route, Code.BAD_FRAMES, f"Chunk {message.index} came without a buffer.")
    return Received(route, message, payload, peer)


def ending(route: Route) -> tuple[Route, Message] | None:
    """Whom to tell, and what, so that a connection behind a relay is ended."""
    step = first_step(route)
    return None if step is None else (step[0], Gone(step[1]))
