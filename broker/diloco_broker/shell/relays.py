"""Messages between the root broker and peers downstream of relays: see `diloco_protocol.relays`."""

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
    """Wraps messages to downstream peers; tracks the chunks of versions that each relay has cached."""

    def __init__(self) -> None:
        self._caches: dict[Route, Cache[bool]] = {}  # by connection of a relay

    def down(self, send: Send) -> tuple[Route, Via, Any] | None:
        """The relay's connection, the envelope and the buffer of a message to a downstream peer.

        None if the receiver is connected directly.
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
        """Forget all connections except these."""
        for route in self._caches.keys() - routes:
            del self._caches[route]


def received(route: Route, frames: Sequence[Any], peer: Peer | None) -> Received | Malformed:
    """Read a message of a relay, or of a peer downstream of it.

    If keys are required, downstream peers are workers whose names the relay vouches for. Raises
    ProtocolError if the relay itself is at fault.
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
        return Malformed(route, Code.BAD_FRAMES, f"Chunk {message.index} has no buffer.")
    return Received(route, message, payload, peer)


def ending(route: Route) -> tuple[Route, Message] | None:
    """The relay's connection and the message that ends a connection downstream of it."""
    step = first_step(route)
    return None if step is None else (step[0], Gone(step[1]))
