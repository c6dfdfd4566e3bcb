"""The state machine of a relay: it stands between the workers of a site and the hub, which decides.

Workers' messages go to the hub unchanged, and its answers come back (`diloco_protocol.relays`). A relay
does three things itself. It holds the chunks of pseudo-gradients: it reports each to the hub, and sends
the weighted mean of those that the hub collects. It caches the chunks of versions, so that each crosses
the link to the hub once. And it serves downstream relays as the hub would: a sum is made of the chunks
of its own workers and of the sums of those relays.

No state outlives a connection to the hub: when that breaks, the relay closes the workers' connections.
They train on, reconnect here or elsewhere, and offer their pushes again.

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
# Seconds between two probes of the hub, and without a message from it before the relay reconnects.
PROBE_S = 1.0
HUB_TIMEOUT_S = 15.0
# Downstream relays; each costs memory and a place in every broadcast.
MOST_RELAYS = 64
# The largest parameter in a chunk that is combined: its product with any valid weight is finite in fp32.
# A chunk with a larger norm goes to the hub unchanged.
LARGEST = 1e18
LARGEST_FP16 = 65504.0
# Errors after which the relay tries the next address: the hub has no lease, or is ending.
ELSEWHERE = (Code.STANDBY, Code.STOPPING)
NO_HUB = "This relay is not connected to its hub; try again."


@dataclass(frozen=True)
class SendUp:
    """Send to the hub; on the data connection if `bulk`. `via` names a sender behind the relay."""

    message: Message
    payload: Any = None
    via: Via | None = None
    bulk: bool = False


@dataclass(frozen=True)
class SendDown:
    """Send on a connection of the site; `via` names the receiver if that is behind another relay."""

    route: Route
    message: Message
    payload: Any = None
    via: Via | None = None


@dataclass(frozen=True)
class Close:
    """Close this connection of the site."""

    route: Route


@dataclass(frozen=True)
class Reconnect:
    """Open new connections to the hub."""

    why: str


@dataclass(frozen=True)
class Stop:
    """The run is over; end the relay."""

    why: str


@dataclass(frozen=True)
class Log:
    text: str
    is_warning: bool = False


Command = SendUp | SendDown | Close | Reconnect | Stop | Log
Commands = Iterator[Command]


@dataclass(frozen=True)
class Term:
    """A held chunk, or a downstream relay's sum, and its weight."""

    payload: Any
    wire_dtype: str
    weight: float


class Sums(Protocol):
    """The tensor work of a relay."""

    def inspect(self, span: ChunkSpan, payload: Any, wire_dtype: str) -> tuple[float | None, int]:
        """Return the sum of the squared values, None where the chunk is not finite or cannot be read,
        and its fingerprint, as in `Held`."""

    def mean(self, fragment: int, span: ChunkSpan, terms: list[Term], wire_dtype: str) -> Any:
        """Return the weighted mean in this dtype; of integers, the maximum."""

    def reset(self) -> None:
        """Drop all residuals: another model is trained from now on."""


@dataclass
class _Connection:
    """A connection of the site."""

    is_bulk: bool  # its messages go up on the data connection
    is_member: bool = False  # the hub has admitted its worker, or it is a relay's
    admitted: bytes = b""  # the session of its worker, once the hub has admitted that
    session: bytes = b""  # of the last push on it
    relay: Route | None = None  # of a downstream relay: that relay's control connection
    incarnation: int | None = None  # of that relay, on its control connection
    silent_since: float | None = None  # also there; None if it sent a message since the last tick
    forwarded: set[bytes] = field(default_factory=set)  # that relay's connections, as it names them
    sent: Cache[bool] = field(default_factory=Cache)  # version chunks that it has received


@dataclass
class _Offer:
    """A push that a worker has offered on its present connection.

    The relay holds only chunks that the hub has granted: others would never be collected.
    """

    push: messages.Push
    is_granted: bool = False
    seen: set[int] = field(default_factory=set)  # chunks that have arrived


@dataclass
class _Chunk:
    """A chunk of a push that is held for the hub, here or by a downstream relay."""

    payload: Any = None
    wire_dtype: str = ""
    relay: Route | None = None  # the downstream relay's control connection
    number: int = 0  # its number there


@dataclass
class _Request:
    """A request of the hub for which sums of downstream relays are pending."""

    collect: messages.Collect
    terms: list[Term] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of the parts in these
    # By our request to a downstream relay, in order: its parts by their number there.
    pending: dict[int, dict[int, messages.Part]] = field(default_factory=dict)
    sums: dict[int, Term] = field(default_factory=dict)  # received, by that request


class Relay:
    """The core of a relay; see the module's docstring.

    Args:
        name: shown in displays.
        draw: returns an unpredictable number below 2**64.
        sums: its tensor work.
        wire_dtype: dtype of the parameters in its sums; None: as in the run.
    """

    def __init__(
        self, name: str, draw: Callable[[], int], sums: Sums, wire_dtype: str | None = None
    ) -> None:
        self._wire_dtype = wire_dtype
        self._name, self._draw, self._sums = name, draw, sums
        self._incarnation = draw()
        self.terms: messages.Attached | None = None  # None until the hub has accepted the relay
        self._spans: tuple[tuple[ChunkSpan, ...], ...] = ()
        self._connections: dict[Route, _Connection] = {}
        self._sessions: set[bytes] = set()  # of workers that the hub has admitted
        self._relays: dict[bytes, Route] = {}  # control connections of downstream relays, by token
        self._offers: dict[tuple[bytes, int], _Offer] = {}  # by session and fragment
        self._held: dict[int, _Chunk] = {}  # by number, which grows
        self._next = 0
        self._requested: dict[int, _Request] = {}  # by the hub's request
        # Our requests to downstream relays: the hub's request, and the relay's control connection.
        self._forwarded: dict[int, tuple[int, Route]] = {}
        self._made = 0
        self._caches: tuple[Cache[Any], Cache[Any]] = (Cache(), Cache())  # the second of bulk
        self._is_connected = False
        self._probed_at = self._heard_at = 0.0

    @property
    def held_bytes(self) -> int:
        """Bytes of the chunks that are held here, not by downstream relays."""
        return sum(each.payload.nbytes for each in self._held.values() if each.relay is None)

    @property
    def _sum_dtype(self) -> str:
        assert self.terms is not None
        return self._wire_dtype or self.terms.wire_dtype

    def is_member(self, route: Route) -> bool:
        """Whether this connection is an admitted worker's or a relay's; others are unauthenticated."""
        connection = self._connections.get(route)
        return connection is not None and connection.is_member

    @property
    def members(self) -> frozenset[Route]:
        """The connections with `is_member`."""
        return frozenset(route for route, each in self._connections.items() if each.is_member)

    # The hub.

    def connected(self, now: float) -> Commands:
        """New connections to the hub are up."""
        self._is_connected, self._heard_at = True, now
        yield SendUp(messages.Attach(self._name, self._incarnation))

    def disconnected(self, why: str) -> Commands:
        """The connections to the hub broke: drop everything that depends on them."""
        if self.terms is not None:
            why = why.rstrip(".")
            yield Log(f"Lost the hub: {why}. The workers train on.", is_warning=True)
        self.terms, self._is_connected = None, False
        yield from map(Close, list(self._connections))
        for state in (self._connections, self._sessions, self._relays, self._offers):
            state.clear()
        for pending in (self._held, self._requested, self._forwarded):
            pending.clear()
        self._caches = (Cache(), Cache())

    def tick(self, now: float) -> Commands:
        """Probe the hub, and reconnect if it is silent. Call it a few times a second."""
        if self._is_connected and now - self._heard_at > HUB_TIMEOUT_S:
            why = f"no message for {HUB_TIMEOUT_S:g} s."
            yield from self.disconnected(why)
            yield Reconnect(why)
        elif now - self._probed_at >= PROBE_S:
            self._probed_at = now
            if self.terms is not None:
                yield SendUp(messages.Probe(0))
        for route in list(self._relays.values()):
            connection = self._connections[route]
            if connection.silent_since is None:
                connection.silent_since = now
            elif now - connection.silent_since > HUB_TIMEOUT_S:
                yield Close(route)

    def receive_from_hub(
        self, via: Via | None, message: Message, payload: Any, now: float, *, bulk: bool = False
    ) -> Commands:
        """Handle a message of the hub: to this relay, or with `via` to a connection behind it."""
        self._heard_at = now
        match message:
            case _ if via is not None:
                yield from self._forward_down(via, message, payload, self._caches[bulk])
            case messages.Attached():
                yield from self._accepted(message)
            case messages.Collect():
                yield from self._collect(message)
            case messages.Forget(numbers):
                yield from self._forget(numbers)
            case messages.Gone(who):
                yield from self._close(who)
            case messages.Notice("shutdown", text):
                for route in self._relays.values():
                    yield SendDown(route, message)
                yield Stop(text)
            case messages.Error(text=text) if self.terms is None:
                yield Log(f"The hub rejected this relay: {text}", is_warning=True)
                yield Reconnect(text)

    def _accepted(self, terms: messages.Attached) -> Commands:
        if self.terms is None:
            yield SendUp(messages.Attach(self._name, self._incarnation, terms.token), bulk=True)
            yield Log("Attached to the hub.")
        self.terms = terms
        spans = tuple(
            cut(dict(zip(Segment, each, strict=False)), terms.chunk_elements)
            for each in terms.fragments
        )
        if spans and spans != self._spans:  # the first model, or that of another run
            self._spans = spans
            self._sums.reset()
        for token, route in list(self._relays.items()):
            yield SendDown(route, replace(terms, token=token))

    def _forward_down(
        self, via: Via, message: Message, payload: Any, cache: Cache[Any]
    ) -> Commands:
        if isinstance(message, messages.Chunk):
            if payload is None:
                payload = cache.get(message)
                assert payload is not None, "the hub left out a chunk that is not cached"
            else:
                cache.put(message, payload)
        step = first_step(via.who)
        if step is None:
            self._note_answer(via.who, message)
            yield SendDown(via.who, message, payload)
        else:
            route, who = step
            yield SendDown(route, message, self._unless_sent(route, message, payload), Via(who))
        if isinstance(message, messages.Error) and message.code in ELSEWHERE:
            yield from self.disconnected(message.text)
            yield Reconnect(message.text)

    def _note_answer(self, route: Route, message: Message) -> None:
        """Note that the hub has admitted a worker, or granted its push."""
        connection = self._connections.get(route)
        if connection is None:
            return
        if isinstance(message, messages.Welcome):
            self._sessions.discard(connection.admitted)
            self._sessions.add(message.session)
            connection.is_member, connection.admitted = True, message.session
        elif isinstance(message, messages.Grant):
            offer = self._offers.get((connection.session, message.fragment))
            if offer is not None and offer.push.push_id == message.push_id:
                wanted = (messages.Standing.NEW, messages.Standing.RESUME)
                offer.is_granted |= message.standing in wanted

    def _unless_sent(self, route: Route, message: Message, payload: Any) -> Any:
        """The payload for a downstream relay; None for a version chunk that it has."""
        connection = self._connections.get(route)
        if not isinstance(message, messages.Chunk) or connection is None:
            return payload
        if connection.sent.get(message):
            return None
        connection.sent.put(message, True)
        return payload

    def _close(self, who: bytes) -> Commands:
        step = first_step(who)
        if step is None:
            yield Close(who)
        else:
            yield SendDown(step[0], messages.Gone(step[1]))

    # The site.

    def receive(
        self, route: Route, via: Via | None, message: Message, payload: Any, peer: str | None = None
    ) -> Commands:
        """Handle a message of the site: a worker's own, or with `via` one that a relay forwards."""
        if self.terms is None:
            yield from self._refuse(route, message)
            return
        connection = self._connections.get(route)
        if connection is None:
            is_bulk = isinstance(message, messages.Chunk | messages.Credit | messages.Lane)
            connection = self._connections[route] = _Connection(is_bulk)
        if (control := self._connections.get(connection.relay or b"")) is not None:
            control.silent_since = None
        if via is not None:
            if connection.relay is not None:
                full = self._full_via(route, connection, replace(via, peer=via.peer or peer))
                buffer = payload if via.held is None else None
                yield SendUp(message, buffer, full, bulk=connection.is_bulk)
            return
        match message:
            case messages.Attach():
                yield from self._attach(route, connection, message)
            case messages.Probe() if connection.relay is not None:
                yield SendDown(route, messages.Probe(message.number))
            case messages.Gone(who) if connection.relay is not None:
                connection.forwarded.discard(who)
                yield SendUp(messages.Gone(way(route, who)), bulk=connection.is_bulk)
            case messages.Combined() if connection.relay is not None:
                yield from self._combined(connection.relay, message, payload)
            case _:
                yield from self._forward_up(route, connection, message, payload, peer)

    def _refuse(self, route: Route, message: Message) -> Commands:
        if isinstance(message, messages.Join | messages.Attach):
            error = messages.Error(Code.STANDBY, NO_HUB, retry=True, about=message.kind)
            yield SendDown(route, error)
        else:
            yield Close(route)

    def _forward_up(
        self,
        route: Route,
        connection: _Connection,
        message: Message,
        payload: Any,
        peer: str | None,
    ) -> Commands:
        held = None
        session = getattr(message, "session", None)
        if session != connection.admitted and session in self._sessions:
            connection.is_member, connection.admitted = True, session
        if isinstance(message, messages.Push):
            self._offered(connection, message)
        elif isinstance(message, messages.Chunk):
            held = self._inspected(message, payload)
        payload = None if held is not None else payload
        yield SendUp(message, payload, Via(route, peer, held), bulk=connection.is_bulk)

    def _offered(self, connection: _Connection, push: messages.Push) -> None:
        if not 0 <= push.fragment < len(self._spans):
            return  # the hub refuses it
        if connection.session != push.session:
            self._drop_offers(connection)
        connection.session = push.session
        key = (push.session, push.fragment)
        known = self._offers.get(key)
        if known is None or known.push.push_id != push.push_id:
            self._offers[key] = _Offer(replace(push, ledger=None))

    def _drop_offers(self, connection: _Connection) -> None:
        for key in [key for key in self._offers if key[0] == connection.session]:
            del self._offers[key]

    def _inspected(self, chunk: messages.Chunk, payload: Any) -> Held | None:
        """Hold a chunk and return what the hub is told of it; None for a chunk that is forwarded."""
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
        squares, fingerprint = self._sums.inspect(spans[chunk.index], payload, push.wire_dtype)
        largest = LARGEST_FP16 if self._sum_dtype == "fp16" else LARGEST
        if squares is not None and squares > largest**2:
            return None
        held = Held(0, payload.nbytes, squares, fingerprint)
        return held if squares is None else self._hold(_Chunk(payload, push.wire_dtype), held)

    def _hold(self, chunk: _Chunk, held: Held) -> Held:
        number = self._next
        self._next += 1
        self._held[number] = chunk
        return Held(number, held.nbytes, held.squares, held.fingerprint)

    def closed(self, route: Route) -> Commands:
        """A connection of the site was closed."""
        connection = self._connections.pop(route, None)
        if connection is None:
            # The hub still sends to it: a message of its data connection arrived after it was closed.
            if self.terms is not None:
                yield SendUp(messages.Gone(route))
            return
        if connection.admitted and not connection.is_bulk:
            self._sessions.discard(connection.admitted)
            for other, each in list(self._connections.items()):
                if each.admitted == connection.admitted:
                    yield Close(other)
        if connection.relay is not None:
            yield from self._relay_closed(connection.relay)
        else:
            self._drop_offers(connection)
        for who in connection.forwarded:
            yield SendUp(messages.Gone(way(route, who)), bulk=connection.is_bulk)
        yield SendUp(messages.Gone(route), bulk=connection.is_bulk)

    def probe_all(self) -> Commands:
        """Some connection of the site was closed: send to each, so that the closed one fails."""
        for route, connection in list(self._connections.items()):
            if not connection.is_bulk:
                yield SendDown(route, messages.Notice("alive"))

    # Downstream relays.

    def _attach(self, route: Route, connection: _Connection, attach: messages.Attach) -> Commands:
        assert self.terms is not None
        if attach.token is None and len(self._relays) < MOST_RELAYS and connection.relay is None:
            for former in list(self._relays.values()):
                if self._connections[former].incarnation == attach.incarnation:
                    yield Close(former)  # it has reconnected
            token = self._draw().to_bytes(8, "big")
            self._relays[token] = connection.relay = route
            connection.is_member, connection.incarnation = True, attach.incarnation
            yield SendDown(route, replace(self.terms, token=token))
        elif (control := self._relays.get(attach.token or b"")) is not None:
            connection.relay, connection.is_bulk, connection.is_member = control, True, True
        else:
            yield Close(route)

    def _full_via(self, route: Route, connection: _Connection, via: Via) -> Via:
        """The sender of a message that a downstream relay forwards, as the hub names it."""
        assert connection.relay is not None
        held = via.held
        if held is not None and held.squares is not None:
            held = self._hold(_Chunk(relay=connection.relay, number=held.number), held)
        connection.forwarded.add(via.who)
        return Via(way(route, via.who), via.peer, held)

    def _relay_closed(self, control: Route) -> Commands:
        for route, connection in list(self._connections.items()):
            if connection.relay == control:
                yield Close(route)  # the other of its two
        self._relays = {token: route for token, route in self._relays.items() if route != control}
        self._held = {n: each for n, each in self._held.items() if each.relay != control}
        for ours in [ours for ours, (_, route) in self._forwarded.items() if route == control]:
            yield from self._combined(control, messages.Combined(ours, 0, 0, (), ""), None)

    def _combined(self, control: Route, combined: messages.Combined, payload: Any) -> Commands:
        """A downstream relay answers one of our requests."""
        number, asked = self._forwarded.get(combined.request, (0, b""))
        request = self._requested.get(number)
        if request is None or asked != control:
            return
        del self._forwarded[combined.request]
        parts = request.pending.pop(combined.request)
        found = [part for number, part in parts.items() if number in combined.numbers]
        if found and self._is_sum(request.collect, combined.wire_dtype, payload):
            weight = sum(each.weight for each in found)
            request.sums[combined.request] = Term(payload, combined.wire_dtype, weight)
            request.numbers += [each.number for each in found]
        yield from self._answer(request)

    def _is_sum(self, collect: messages.Collect, wire_dtype: str, payload: Any) -> bool:
        """Whether this can be added to others."""
        span = self._spans[collect.fragment][collect.index]
        if wire_dtype not in WIRE_DTYPES:
            return False
        fits = least_bytes(span, wire_dtype) <= payload.nbytes <= span_bytes(span, wire_dtype)
        return fits and self._sums.inspect(span, payload, wire_dtype)[0] is not None

    # Sums.

    def _collect(self, collect: messages.Collect) -> Commands:
        request = self._requested[collect.request] = _Request(collect)
        downstream: dict[Route, dict[int, messages.Part]] = {}
        for part in collect.parts:
            chunk = self._held.pop(part.number, None)
            if chunk is None:
                continue
            if chunk.relay is not None:
                downstream.setdefault(chunk.relay, {})[chunk.number] = part
            else:
                request.terms.append(Term(chunk.payload, chunk.wire_dtype, part.weight))
                request.numbers.append(part.number)
        for route, parts in downstream.items():
            self._made += 1
            self._forwarded[self._made] = (collect.request, route)
            request.pending[self._made] = parts
            listed = tuple(messages.Part(number, each.weight) for number, each in parts.items())
            yield SendDown(route, replace(collect, request=self._made, parts=listed))
        yield from self._answer(request)

    def _answer(self, request: _Request) -> Commands:
        """Answer the hub if no sum is pending."""
        collect = request.collect
        # A relay may close, and its request be answered, while another one is still being sent to.
        is_current = self._requested.get(collect.request) is request
        if request.pending or not is_current or self.terms is None:
            return
        del self._requested[collect.request]
        dtype, made = self._sum_dtype, None
        terms = [*request.terms, *(request.sums[number] for number in sorted(request.sums))]
        if len(terms) == 1 and self._wire_dtype in (None, terms[0].wire_dtype):
            made, dtype = terms[0].payload, terms[0].wire_dtype  # unchanged, bit for bit
        elif terms:
            span = self._spans[collect.fragment][collect.index]
            made = self._sums.mean(collect.fragment, span, terms, dtype)
        numbers = tuple(request.numbers)
        answer = messages.Combined(collect.request, collect.fragment, collect.index, numbers, dtype)
        yield SendUp(answer, made, bulk=True)

    def _forget(self, numbers: tuple[int, ...]) -> Commands:
        downstream: dict[Route, list[int]] = {}
        for number in numbers:
            chunk = self._held.pop(number, None)
            if chunk is not None and chunk.relay is not None:
                downstream.setdefault(chunk.relay, []).append(chunk.number)
        for route, listed in downstream.items():
            yield SendDown(route, messages.Forget(tuple(listed)))
