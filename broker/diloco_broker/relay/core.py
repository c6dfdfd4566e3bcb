"""A relay: between the workers of a site and their hub, which decides everything.

What a worker says goes to the hub as it is, and the hub's answers come back (`diloco_protocol.relays`).
Three things are done here. The chunks of pseudo-gradients stay: the hub is told of each, and asks for
the weighted mean of those that it wants. Chunks of versions are kept for the other workers, so that each
comes over the line once. And a relay behind this one is served as the hub would serve it: what this one
is asked for is made of its workers' chunks and of the sums of relays behind it.

Nothing in here outlives a connection to the hub: without one the workers' connections are ended, they
train on and come back, through this relay or another one, and offer their pushes again.

`now` is an argument, random numbers are handed in, tensors are behind `Sums`. Methods yield commands for
the shell, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from diloco_protocol import messages
from diloco_protocol.chunks import ChunkSpan, Segment, cut
from diloco_protocol.dtypes import WIRE_DTYPES, least_bytes, span_bytes
from diloco_protocol.errors import Code
from diloco_protocol.messages import Held, Message, Via
from diloco_protocol.relays import Cache, first_step, way

Route = bytes
# Between two words to the hub, and after which the hub is given up that says nothing.
SPEAK_S = 1.0
HUB_SILENT_S = 15.0
# What a hub that has no lease answers to those who join, and one that ends.
ELSEWHERE = (Code.STANDBY, Code.STOPPING)
NO_HUB = "This relay has no connection to its hub now; it lets workers in as soon as it has."


@dataclass(frozen=True)
class Up:
    """Send to the hub; `bulk`: on the connection for chunks. `via` is whose message it is."""

    message: Message
    payload: Any = None
    via: Via | None = None
    bulk: bool = False


@dataclass(frozen=True)
class Down:
    """Send to somebody of the site; `via` where it is for somebody behind another relay."""

    route: Route
    message: Message
    payload: Any = None
    via: Via | None = None


@dataclass(frozen=True)
class End:
    """End this connection of the site."""

    route: Route


@dataclass(frozen=True)
class Reconnect:
    """Open new connections to the hub."""

    why: str


@dataclass(frozen=True)
class Over:
    """The run is over, and nothing is left to do."""

    why: str


@dataclass(frozen=True)
class Say:
    text: str
    is_trouble: bool = False


Command = Up | Down | End | Reconnect | Over | Say
Commands = Iterator[Command]


@dataclass(frozen=True)
class Term:
    """A chunk that is held here, or a sum that a relay behind this one has sent, and its weight."""

    payload: Any
    wire_dtype: str
    weight: float


class Sums(Protocol):
    """The tensors of a relay."""

    def look(self, span: ChunkSpan, payload: Any, wire_dtype: str) -> tuple[float | None, int]:
        """Return the sum of the squared values, None where the chunk is not finite or cannot be read,
        and its fingerprint, as `Held` has them."""

    def mean(self, fragment: int, span: ChunkSpan, terms: list[Term], wire_dtype: str) -> Any:
        """Return the weighted mean in this dtype, of integers the maximum."""

    def forget(self) -> None:
        """Another model is trained from now on."""


@dataclass
class Guest:
    """A connection of the site."""

    is_bulk: bool  # what it says goes up on the connection for chunks
    session: bytes | None = None  # of the worker whose push came on it last
    first: Route | None = None  # of a relay behind this one: the first of its two connections
    # What that relay calls those who spoke through it.
    behind: set[bytes] = field(default_factory=set)
    # The chunks of versions that it has of this connection.
    has: Cache[bool] = field(default_factory=Cache)


@dataclass
class _Offer:
    """A push that a worker has offered on its present connection.

    What the hub did not ask for is not held: it would never be asked for, and grow.
    """

    push: messages.Push
    is_granted: bool = False
    seen: set[int] = field(default_factory=set)  # its chunks that have come


@dataclass
class _Chunk:
    """A chunk of a push that is kept for the hub: here, or at a relay behind this one."""

    payload: Any = None
    wire_dtype: str = ""
    at: Route | None = None  # the relay's first connection
    number: int = 0  # its number there


@dataclass
class _Asked:
    """What the hub has asked for and sums of relays behind this one are missing for."""

    collect: messages.Collect
    terms: list[Term] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of the parts that are in these
    # By request of ours to a relay behind this one, in order: its parts by their number there.
    waiting: dict[int, dict[int, messages.Part]] = field(default_factory=dict)
    sums: dict[int, Term] = field(default_factory=dict)  # that have come, by that request


class Relay:
    """See the head of this module.

    Args:
        name: the relay's, for people.
        draw: returns an unpredictable number below 2**64.
        sums: its tensors.
        wire_dtype: what parameters in its sums travel in; None: what they do in the run.
    """

    def __init__(
        self, name: str, draw: Callable[[], int], sums: Sums, wire_dtype: str | None = None
    ) -> None:
        self._wire_dtype = wire_dtype
        self._name, self._draw, self._sums = name, draw, sums
        self._life = draw()
        self.terms: messages.Attached | None = None  # None while the hub has not let it in
        self._spans: tuple[tuple[ChunkSpan, ...], ...] = ()
        self._guests: dict[Route, Guest] = {}
        # By token, the first connection of each relay behind this one.
        self._relays: dict[bytes, Route] = {}
        self._offers: dict[tuple[bytes, int], _Offer] = {}  # by session and fragment
        self._held: dict[int, _Chunk] = {}  # by number, which grows
        self._next = 0
        self._asked: dict[int, _Asked] = {}  # by request of the hub's
        # Of ours to relays behind this one: the hub's that it is for, and whom it went to.
        self._requests: dict[int, tuple[int, Route]] = {}
        self._made = 0
        self._caches: tuple[Cache[Any], Cache[Any]] = (Cache(), Cache())  # the second of bulk
        self._is_connected = False  # as far as is known
        self._spoke_at = self._heard_at = 0.0

    @property
    def held_bytes(self) -> int:
        """Of chunks that are held here, and not at a relay behind this one."""
        return sum(each.payload.nbytes for each in self._held.values() if each.at is None)

    @property
    def guests(self) -> frozenset[Route]:
        """Connections that have said something the hub was told of."""
        return frozenset(self._guests)

    # The hub.

    def connected(self, now: float) -> Commands:
        """There are new connections to the hub."""
        self._is_connected, self._heard_at = True, now
        yield Up(messages.Attach(self._name, self._life))

    def disconnected(self, why: str) -> Commands:
        """They are gone: so is everything that came or went on them."""
        if self.terms is not None:
            why = why.rstrip(".")
            yield Say(f"The connection to the hub is over: {why}. The workers train on.", True)
        self.terms, self._is_connected = None, False
        yield from map(End, list(self._guests))
        for kept in (self._guests, self._relays, self._offers, self._held, self._asked):
            kept.clear()
        self._requests.clear()
        self._caches = (Cache(), Cache())

    def tick(self, now: float) -> Commands:
        """Time has passed. To be called a few times a second."""
        if self._is_connected and now - self._heard_at > HUB_SILENT_S:
            why = f"nothing was heard of it for {HUB_SILENT_S:g} s."
            yield from self.disconnected(why)
            yield Reconnect(why)
        elif now - self._spoke_at >= SPEAK_S:
            self._spoke_at = now
            if self.terms is not None:
                yield Up(messages.Probe(0))

    def hears_hub(
        self, via: Via | None, message: Message, payload: Any, now: float, *, bulk: bool = False
    ) -> Commands:
        """A message of the hub, to this relay or to somebody behind it."""
        self._heard_at = now
        match message:
            case _ if via is not None:
                yield from self._passes_down(via, message, payload, self._caches[bulk])
            case messages.Attached():
                yield from self._is_let_in(message)
            case messages.Collect():
                yield from self._is_asked(message)
            case messages.Forget(below):
                yield from self._forgets(below)
            case messages.Gone(who):
                yield from self._ends(who)
            case messages.Notice("shutdown", text):
                for route in self._relays.values():
                    yield Down(route, message)
                yield Over(text)
            case messages.Error(text=text) if self.terms is None:
                yield Say(f"The hub does not let this relay in: {text}", True)
                yield Reconnect(text)

    def _is_let_in(self, terms: messages.Attached) -> Commands:
        if self.terms is None:
            yield Up(messages.Attach(self._name, self._life, terms.token), bulk=True)
            yield Say("The hub has let this relay in.")
        self.terms = terms
        spans = tuple(
            cut(dict(zip(Segment, each, strict=False)), terms.chunk_elements)
            for each in terms.fragments
        )
        if spans and spans != self._spans:  # the first model, or that of another run
            self._spans = spans
            self._sums.forget()
        for token, route in list(self._relays.items()):
            yield Down(route, replace(terms, token=token))

    def _passes_down(self, via: Via, message: Message, payload: Any, cache: Cache[Any]) -> Commands:
        if isinstance(message, messages.Chunk):
            if payload is None:
                payload = cache.get(message)
                assert payload is not None, "the hub takes a chunk to be here that is not"
            else:
                cache.put(message, payload)
        step = first_step(via.who)
        if step is None:
            if isinstance(message, messages.Grant):
                self._is_granted(via.who, message)
            yield Down(via.who, message, payload)
        else:
            route, who = step
            yield Down(route, message, self._left_out(route, message, payload), Via(who))
        if isinstance(message, messages.Error) and message.code in ELSEWHERE:
            yield from self.disconnected(message.text)
            yield Reconnect(message.text)

    def _is_granted(self, route: Route, grant: messages.Grant) -> None:
        guest = self._guests.get(route)
        key = (guest.session or b"", grant.fragment) if guest is not None else None
        offer = self._offers.get(key) if key is not None else None
        if offer is not None and offer.push.push_id == grant.push_id:
            wanted = (messages.Standing.NEW, messages.Standing.RESUME)
            offer.is_granted |= grant.standing in wanted

    def _left_out(self, route: Route, message: Message, payload: Any) -> Any:
        """The buffer for a relay behind this one; None where that has it."""
        guest = self._guests.get(route)
        if not isinstance(message, messages.Chunk) or guest is None:
            return payload
        if guest.has.get(message):
            return None
        guest.has.put(message, True)
        return payload

    def _ends(self, who: bytes) -> Commands:
        step = first_step(who)
        if step is None:
            yield End(who)
        else:
            yield Down(step[0], messages.Gone(step[1]))

    # The site.

    def hears(
        self,
        route: Route,
        via: Via | None,
        message: Message,
        payload: Any,
        peer: str | None = None,
    ) -> Commands:
        """A message of the site: of a worker, or through a relay behind this one."""
        if self.terms is None:
            yield from self._puts_off(route, message)
            return
        guest = self._guests.get(route)
        if guest is None:
            is_bulk = isinstance(message, messages.Chunk | messages.Credit | messages.Lane)
            guest = self._guests[route] = Guest(is_bulk)
        if via is not None:
            if guest.first is not None:
                passed = self._passes_on(route, guest, replace(via, peer=via.peer or peer))
                buffer = payload if via.held is None else None
                yield Up(message, buffer, passed, bulk=guest.is_bulk)
            return
        match message:
            case messages.Attach():
                yield from self._lets_in(route, guest, message)
            case messages.Probe() if guest.first is not None:
                yield Down(route, messages.Probe(message.number))
            case messages.Gone(who) if guest.first is not None:
                guest.behind.discard(who)
                yield Up(messages.Gone(way(route, who)), bulk=guest.is_bulk)
            case messages.Combined() if guest.first is not None:
                yield from self._has_summed(guest.first, message, payload)
            case _:
                yield from self._passes_up(route, guest, message, payload, peer)

    def _puts_off(self, route: Route, message: Message) -> Commands:
        if isinstance(message, messages.Join | messages.Attach):
            error = messages.Error(Code.STANDBY, NO_HUB, retry=True, about=message.kind)
            yield Down(route, error)
        else:
            yield End(route)

    def _passes_up(
        self, route: Route, guest: Guest, message: Message, payload: Any, peer: str | None
    ) -> Commands:
        held = None
        if isinstance(message, messages.Push):
            self._is_offered(guest, message)
        elif isinstance(message, messages.Chunk):
            held = self._looked_at(message, payload)
        payload = None if held is not None else payload
        yield Up(message, payload, Via(route, peer, held), bulk=guest.is_bulk)

    def _is_offered(self, guest: Guest, push: messages.Push) -> None:
        if not 0 <= push.fragment < len(self._spans):
            return  # the hub refuses it
        if guest.session != push.session:
            self._ends_offers(guest)
        guest.session = push.session
        key = (push.session, push.fragment)
        known = self._offers.get(key)
        if known is None or known.push.push_id != push.push_id:
            self._offers[key] = _Offer(replace(push, ledger=None))

    def _ends_offers(self, guest: Guest) -> None:
        for key in [key for key in self._offers if key[0] == guest.session]:
            del self._offers[key]

    def _looked_at(self, chunk: messages.Chunk, payload: Any) -> Held | None:
        """What the hub is told of a chunk that stays here; None where it goes on as it is."""
        assert self.terms is not None
        offer = self._offers.get((chunk.session or b"", chunk.fragment))
        if not self.terms.combines or offer is None or offer.push.push_id != chunk.push_id:
            return None
        push = offer.push
        if push.purpose is not messages.Purpose.GRADIENT or chunk.fragment >= len(self._spans):
            return None
        if not offer.is_granted or chunk.index in offer.seen:
            return None
        spans = self._spans[chunk.fragment]
        if not 0 <= chunk.index < len(spans):
            return None
        offer.seen.add(chunk.index)
        squares, fingerprint = self._sums.look(spans[chunk.index], payload, push.wire_dtype)
        held = Held(0, payload.nbytes, squares, fingerprint)
        return held if squares is None else self._holds(_Chunk(payload, push.wire_dtype), held)

    def _holds(self, chunk: _Chunk, held: Held) -> Held:
        number = self._next
        self._next += 1
        self._held[number] = chunk
        return Held(number, held.nbytes, held.squares, held.fingerprint)

    def over(self, route: Route) -> Commands:
        """A connection of the site does not exist any more."""
        guest = self._guests.pop(route, None)
        if guest is None:
            return
        if guest.first is not None:
            yield from self._relay_is_gone(guest.first)
        else:
            self._ends_offers(guest)
        for who in guest.behind:
            yield Up(messages.Gone(way(route, who)), bulk=guest.is_bulk)
        yield Up(messages.Gone(route), bulk=guest.is_bulk)

    def look_for_the_lost(self) -> Commands:
        """A connection of the site was closed, nobody knows whose: a word to each shows it."""
        for route, guest in list(self._guests.items()):
            if not guest.is_bulk:
                yield Down(route, messages.Notice("alive"))

    # Relays behind this one.

    def _lets_in(self, route: Route, guest: Guest, attach: messages.Attach) -> Commands:
        assert self.terms is not None
        if attach.token is None:
            token = self._draw().to_bytes(8, "big")
            self._relays[token] = guest.first = route
            yield Down(route, replace(self.terms, token=token))
        elif (first := self._relays.get(attach.token)) is not None:
            guest.first, guest.is_bulk = first, True
        else:
            yield End(route)

    def _passes_on(self, route: Route, guest: Guest, via: Via) -> Via:
        """Whose a message is that a relay behind this one passes on, as the hub is told."""
        assert guest.first is not None
        held = via.held
        if held is not None and held.squares is not None:
            held = self._holds(_Chunk(at=guest.first, number=held.number), held)
        guest.behind.add(via.who)
        return Via(way(route, via.who), via.peer, held)

    def _relay_is_gone(self, first: Route) -> Commands:
        for route, guest in list(self._guests.items()):
            if guest.first == first:
                yield End(route)  # the other of its two
        self._relays = {token: route for token, route in self._relays.items() if route != first}
        self._held = {n: each for n, each in self._held.items() if each.at != first}
        for ours in [ours for ours, (_, route) in self._requests.items() if route == first]:
            yield from self._has_summed(first, messages.Combined(ours, 0, 0, (), ""), None)

    def _has_summed(self, first: Route, combined: messages.Combined, payload: Any) -> Commands:
        request, asked_of = self._requests.get(combined.request, (0, b""))
        asked = self._asked.get(request)
        if asked is None or asked_of != first:
            return
        del self._requests[combined.request]
        parts = asked.waiting.pop(combined.request)
        found = [part for number, part in parts.items() if number in combined.numbers]
        if found and self._is_sum(asked.collect, combined.wire_dtype, payload):
            weight = sum(each.weight for each in found)
            asked.sums[combined.request] = Term(payload, combined.wire_dtype, weight)
            asked.numbers += [each.number for each in found]
        yield from self._answers(asked)

    def _is_sum(self, collect: messages.Collect, wire_dtype: str, payload: Any) -> bool:
        """Whether this can be added to others."""
        span = self._spans[collect.fragment][collect.index]
        if wire_dtype not in WIRE_DTYPES:
            return False
        fits = least_bytes(span, wire_dtype) <= payload.nbytes <= span_bytes(span, wire_dtype)
        return fits and self._sums.look(span, payload, wire_dtype)[0] is not None

    # Sums.

    def _is_asked(self, collect: messages.Collect) -> Commands:
        asked = self._asked[collect.request] = _Asked(collect)
        behind: dict[Route, dict[int, messages.Part]] = {}
        for part in collect.parts:
            chunk = self._held.pop(part.number, None)
            if chunk is None:
                continue
            if chunk.at is not None:
                behind.setdefault(chunk.at, {})[chunk.number] = part
            else:
                asked.terms.append(Term(chunk.payload, chunk.wire_dtype, part.weight))
                asked.numbers.append(part.number)
        for route, parts in behind.items():
            self._made += 1
            self._requests[self._made] = (collect.request, route)
            asked.waiting[self._made] = parts
            listed = tuple(messages.Part(number, each.weight) for number, each in parts.items())
            yield Down(route, replace(collect, request=self._made, parts=listed))
        yield from self._answers(asked)

    def _answers(self, asked: _Asked) -> Commands:
        """Once nothing is missing."""
        collect = asked.collect
        # A relay may be found gone, and what it was asked for given up, while another is being asked.
        is_current = self._asked.get(collect.request) is asked
        if asked.waiting or not is_current or self.terms is None:
            return
        del self._asked[collect.request]
        dtype, made = self._wire_dtype or self.terms.wire_dtype, None
        terms = [*asked.terms, *(asked.sums[request] for request in sorted(asked.sums))]
        if len(terms) == 1 and self._wire_dtype in (None, terms[0].wire_dtype):
            made, dtype = terms[0].payload, terms[0].wire_dtype  # as it came, to the bit
        elif terms:
            span = self._spans[collect.fragment][collect.index]
            made = self._sums.mean(collect.fragment, span, terms, dtype)
        numbers = tuple(asked.numbers)
        answer = messages.Combined(collect.request, collect.fragment, collect.index, numbers, dtype)
        yield Up(answer, made, bulk=True)

    def _forgets(self, below: int) -> Commands:
        highest: dict[Route, int] = {}
        for number in [number for number in self._held if number < below]:
            chunk = self._held.pop(number)
            if chunk.at is not None:
                highest[chunk.at] = max(highest.get(chunk.at, 0), chunk.number)
        for route, number in highest.items():
            yield Down(route, messages.Forget(number + 1))
