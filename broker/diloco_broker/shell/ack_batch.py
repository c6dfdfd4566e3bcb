"""Acknowledgements of one turn, gathered: one message for each push instead of one for each chunk."""

from __future__ import annotations

from diloco_broker.core.effects import Route, Send
from diloco_protocol.messages import Ack


class Acks:
    """What is to be acknowledged. False while it is nothing.

    An `ack` must not be overtaken by what the core says after it to the same worker: a later `grant`
    gives credit anew. So these are sent before anything else is.
    """

    def __init__(self) -> None:
        self._acks: dict[tuple[Route, int, int], list[Ack]] = {}

    def __bool__(self) -> bool:
        return bool(self._acks)

    def add(self, route: Route, ack: Ack) -> None:
        self._acks.setdefault((route, ack.push_id, ack.fragment), []).append(ack)

    def take(self) -> list[Send]:
        """All of it, as messages."""
        gathered, self._acks = self._acks, {}
        sends = []
        for (route, push_id, fragment), acks in gathered.items():
            chunks = tuple(index for ack in acks for index in ack.chunks)
            sends.append(Send(route, Ack(push_id, fragment, chunks, sum(a.credit for a in acks))))
        return sends
