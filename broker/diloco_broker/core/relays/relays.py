"""The registry of connected relays, and the sums requested from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from diloco_broker.core.effects import AggregateAndStep, Send, WholePush
from diloco_broker.core.relays.relay import Relay, Route
from diloco_broker.core.rounds.round import RemoteChunk
from diloco_protocol.messages import Collect, Part
from diloco_protocol.relays import first_step


@dataclass
class Collecting:
    """A sum that was requested from a relay."""

    request: int
    relay: Relay
    fragment: int
    index: int
    parts: dict[int, RemoteChunk]  # by number, in the order in which they are added


@dataclass
class PendingStep:
    """The outer step of a chunk that waits for sums of relays."""

    step: AggregateAndStep
    pending: int  # sums that have not arrived
    sums: list[WholePush] = field(default_factory=list)


@dataclass
class Relays:
    """Relays by connection, requests that are not answered, and what waits for them."""

    collecting: dict[int, Collecting] = field(default_factory=dict)  # by request
    adding: dict[int, Collecting] = field(default_factory=dict)  # sums being added, by request
    steps: dict[int, PendingStep] = field(default_factory=dict)  # by chunk of the closing round
    collected: int | None = None  # number of the closing round whose chunks are being collected
    requests: int = 0  # made so far
    _by_route: dict[Route, Relay] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Relay]:
        return iter([each for route, each in self._by_route.items() if route == each.control])

    def __bool__(self) -> bool:
        return bool(self._by_route)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def on(self, route: Route) -> Relay | None:
        """The relay whose own connection this is."""
        return self._by_route.get(route)

    def before(self, route: Route) -> Relay | None:
        """The relay that this connection goes through; None for a direct one."""
        if not self._by_route:
            return None
        step = first_step(route)
        return None if step is None else self._by_route.get(step[0])

    def heard(self, route: Route, now: float) -> Relay | None:
        """Note that a message arrived on this connection. Returns the relay whose own it is."""
        if not self._by_route:
            return None
        own = self.on(route)
        relay = own or self.before(route)
        if relay is not None:
            relay.heard_at = now
        return own

    def named(self, name: str) -> Relay | None:
        return next((each for each in self if each.name == name), None)

    def routes(self) -> set[Route]:
        return set(self._by_route)

    def add(self, relay: Relay) -> None:
        self._by_route[relay.control] = relay

    def bind(self, relay: Relay, route: Route) -> None:
        """Record its data connection."""
        relay.bulk = route
        self._by_route[route] = relay

    def remove(self, relay: Relay) -> list[Collecting]:
        """Remove a dead relay. Returns its unanswered requests."""
        self._by_route = {r: each for r, each in self._by_route.items() if each is not relay}
        due = [r for r, each in self.collecting.items() if each.relay is relay]
        return [self.collecting.pop(request) for request in due]

    def collect(self, relay: Relay, fragment: int, chunks: Sequence[RemoteChunk]) -> Send:
        """Request the weighted mean of these, all of one index and held by this relay."""
        for each in chunks:
            del each.push.remote[each.index], relay.held[each.number]
        parts = {each.number: each for each in chunks}
        self.requests += 1
        index = chunks[0].index
        self.collecting[self.requests] = Collecting(self.requests, relay, fragment, index, parts)
        listed = tuple(Part(number, each.push.weight) for number, each in parts.items())
        return Send(relay.control, Collect(self.requests, fragment, index, listed))
