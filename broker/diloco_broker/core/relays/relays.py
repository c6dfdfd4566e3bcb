"""Relays that are connected, the chunks that they hold, and the sums that were asked of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from diloco_broker.core import effects
from diloco_broker.core.relays.relay import Kept, Relay, Route
from diloco_broker.core.rounds.round import PushInProgress
from diloco_protocol.messages import Collect, Forget, Held, Part
from diloco_protocol.relays import first_step


class Due(NamedTuple):
    """A chunk of a push that is at a relay."""

    push: PushInProgress
    kept: Kept


@dataclass
class Collecting:
    """A sum that a relay was asked for."""

    request: int
    relay: Relay
    fragment: int
    index: int
    parts: dict[int, Due]  # by number, in the order in which they are added


@dataclass
class Relays:
    """See the head of this module."""

    collecting: dict[int, Collecting] = field(default_factory=dict)  # by request
    requests: int = 0  # made so far
    _by_route: dict[Route, Relay] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Relay]:
        return iter([each for route, each in self._by_route.items() if route == each.control])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def on(self, route: Route) -> Relay | None:
        """The relay whose own connection this is."""
        return self._by_route.get(route)

    def before(self, route: Route) -> Relay | None:
        """The relay that this connection goes through; None where it is direct."""
        if not self._by_route:
            return None
        step = first_step(route)
        return None if step is None else self._by_route.get(step[0])

    def heard(self, route: Route, now: float) -> Relay | None:
        """Something came on this connection. Returns the relay whose own it is."""
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
        """Its connection for chunks is this one."""
        relay.bulk = route
        self._by_route[route] = relay

    def remove(self, relay: Relay) -> list[Collecting]:
        """It is gone. Returns what was asked of it, which never comes."""
        self._by_route = {r: each for r, each in self._by_route.items() if each is not relay}
        due = [r for r, each in self.collecting.items() if each.relay is relay]
        return [self.collecting.pop(request) for request in due]

    def ask(self, fragment: int, index: int, pushes: Sequence[PushInProgress]) -> effects.Send:
        """Ask one relay for the mean of this chunk of these pushes, all of which it holds."""
        parts = {}
        for push in pushes:
            kept = push.kept.pop(index)
            parts[kept.number] = Due(push, kept)
        relay = kept.relay
        self.requests += 1
        self.collecting[self.requests] = Collecting(self.requests, relay, fragment, index, parts)
        listed = tuple(Part(number, each.push.weight) for number, each in parts.items())
        return effects.Send(relay.control, Collect(self.requests, fragment, index, listed))

    def forget(self, pushes: Iterable[PushInProgress]) -> Iterator[effects.Send]:
        """Tell relays which chunks nobody will ask for; `pushes` are all that are in progress."""
        lowest = {id(each): each.next_number for each in self}
        kept = [each for push in pushes for each in push.kept.values()]
        kept += [due.kept for each in self.collecting.values() for due in each.parts.values()]
        for each in kept:
            lowest[id(each.relay)] = min(lowest[id(each.relay)], each.number)
        for relay in self:
            below = lowest[id(relay)]
            if below > relay.forgets_below:
                relay.forgets_below = below
                yield effects.Send(relay.control, Forget(below))


def keep(relay: Relay, push: PushInProgress, index: int, held: Held) -> None:
    """A relay tells that it holds this chunk of a push."""
    assert held.squares is not None
    relay.next_number = max(relay.next_number, held.number + 1)
    push.kept[index] = Kept(relay, held.number, held.nbytes, held.squares, held.fingerprint)


def by_relay(pushes: Sequence[PushInProgress], index: int) -> list[list[PushInProgress]]:
    """Those of these pushes of which a relay holds this chunk, by relay in the order of their names."""
    found: dict[str, list[PushInProgress]] = {}
    for push in pushes:
        if (kept := push.kept.get(index)) is not None:
            found.setdefault(kept.relay.name, []).append(push)
    return [found[name] for name in sorted(found)]
