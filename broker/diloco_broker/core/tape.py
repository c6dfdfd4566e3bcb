"""Record the events of a core on a tape, and replay them.

A tape starts with the state, followed by every event with its time and a checksum of each resulting
effect. Handling an event depends only on the state, the event and the clocks; randomness is part of the
state (`Draws`). So a core with the same initial state produces the same effects, and a failure on
another machine can be reproduced.

A tape contains no parameters or pseudo-gradients, only their sizes and the fingerprint of each inspected
chunk. It contains session tokens and the seed of future ones: with the tape of a live run its reader can
impersonate the workers.

Object identity is preserved: records that shared an object share it again. Only classes of the core, its
options and the protocol are instantiated, without calling their constructors.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from hashlib import blake2b
from itertools import zip_longest
from typing import Any, get_args
from zlib import crc32

from diloco_broker.core import effects, events, story
from diloco_broker.core.effects import Effect
from diloco_broker.core.events import Event, Now
from diloco_broker.core.machine import Core
from diloco_broker.core.rounds.round import Barrier, InvariantBroken
from diloco_broker.core.versions.reply import Coded
from diloco_protocol.messages import Ack, Chunk, Held, Message, encode
from diloco_protocol.roles import Peer, Role

FORMAT = 1
# Modules whose classes a tape may name; builtin containers have tags.
OURS = (
    "diloco_broker.core.",
    "diloco_broker.standby.lease.",  # part of the state of a hub with a standby
    "diloco_broker.config.",
    "diloco_protocol.",
)
_PLAIN = frozenset({type(None), bool, float, str, bytes})
MOST_BYTES = 1 << 31  # the largest buffer that a placeholder may stand for
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1  # the range of integers in msgpack


@dataclass
class Draws:
    """Numbers below 2**64: keyed BLAKE2b of a counter, reproducible from a secret seed of 32 bytes."""

    seed: bytes
    count: int = 0

    def __call__(self) -> int:
        self.count += 1
        found = blake2b(self.count.to_bytes(8, "big"), digest_size=8, key=self.seed)
        return int.from_bytes(found.digest(), "big")


class NotPlain(TypeError):
    """A value that cannot be written to a tape."""


Shape = tuple[str, tuple[str, ...]]  # a class, and the names of an object's attributes


class Codec:
    """Converts objects of the core to plain values for msgpack, and back.

    Plain values refer to shapes by number. `new_shapes` returns the shapes used since the last call; a
    tape has them before the values that use them, and they are registered with `know`.
    """

    def __init__(self) -> None:
        self._numbers: dict[Shape, int] = {}
        self._shapes: list[tuple[Any, tuple[str, ...]]] = []
        self._written = 0

    def freeze(self, value: Any) -> Any:
        """Convert to plain values; raises NotPlain for an object that has none."""
        return _Freezer(self._numbers).plain(value)

    def thaw(self, plain: Any) -> Any:
        """Restore a frozen object; raises ValueError, TypeError or LookupError for invalid values."""
        return _Thawer(self._shapes).made(plain)

    def new_shapes(self) -> list[Any]:
        found = [[title, list(names)] for title, names in list(self._numbers)[self._written :]]
        self._written = len(self._numbers)
        return found

    def know(self, shapes: Iterable[Any]) -> None:
        """Register shapes; raises ValueError for a class that a tape may not name."""
        self._shapes += [(_kind(title), tuple(names)) for title, names in shapes]


@cache
def _slots_of(kind: type) -> tuple[str, ...]:
    return tuple(name for each in kind.__mro__ for name in getattr(each, "__slots__", ()))


@cache
def _is_ours(kind: type) -> bool:
    return f"{kind.__module__}.".startswith(OURS)


@cache
def _title(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


@cache
def _kind(title: str) -> Any:
    module, _, name = title.partition(":")
    found: Any = getattr(sys.modules.get(module), name, None)
    is_ours = f"{module}.".startswith(OURS) and getattr(found, "__module__", "") == module
    if not is_ours or not isinstance(found, type):
        raise ValueError(f"a tape cannot contain {title!r:.80}")
    return found


class _Freezer:
    """Converts one value; an object that occurs twice is written once."""

    def __init__(self, shapes: dict[Shape, int], *, shares: bool = True) -> None:
        self._shapes = shapes
        # Numbers of shared objects, by identity; None: equal objects have equal plain values.
        self._numbers: dict[int, int] | None = {} if shares else None

    def plain(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if _LEAST <= value <= _MOST else ["i", str(value)]
        if kind is tuple:
            return ["t", [self.plain(each) for each in value]]
        if kind is frozenset:
            return ["f", [self.plain(each) for each in value]]
        if isinstance(value, Enum):
            return ["e", self._shape(kind, ()), value.value]
        if self._numbers is None:
            return self._shared(value, kind, 0)
        known = self._numbers.get(id(value))
        if known is not None:
            return ["=", known]
        number = self._numbers[id(value)] = len(self._numbers)
        return self._shared(value, kind, number)

    def _shared(self, value: Any, kind: type, number: int) -> Any:
        if kind is list:
            return ["l", number, [self.plain(each) for each in value]]
        if kind is set:
            return ["s", number, [self.plain(each) for each in value]]
        if kind is deque:
            return ["q", number, value.maxlen, [self.plain(each) for each in value]]
        if kind in (dict, Counter, defaultdict):
            pairs = [[self.plain(key), self.plain(each)] for key, each in value.items()]
            factory = getattr(value, "default_factory", None)
            made_by = None if factory is None else self._shape(factory, ())
            return ["c" if kind is Counter else "d", number, made_by, pairs]
        if not _is_ours(kind):
            nbytes = getattr(value, "nbytes", None)
            if nbytes is None:
                raise NotPlain(f"a tape cannot contain {_title(kind)}")
            return ["b", int(nbytes)]
        if slots := _slots_of(kind):
            shape = self._shape(kind, slots)
            return ["o", number, shape, [self.plain(getattr(value, name)) for name in slots]]
        own = vars(value)
        shape = self._shape(kind, tuple(own))
        return ["o", number, shape, [self.plain(each) for each in own.values()]]

    def _shape(self, kind: type, names: tuple[str, ...]) -> int:
        return self._shapes.setdefault((_title(kind), names), len(self._shapes))


class _Thawer:
    def __init__(self, shapes: Sequence[tuple[Any, tuple[str, ...]]]) -> None:
        self._shapes = shapes
        self._made: dict[int, Any] = {}

    def made(self, plain: Any) -> Any:
        if not isinstance(plain, list):
            return plain
        match plain:
            case ["t", items]:
                return tuple(map(self.made, items))
            case ["f", items]:
                return frozenset(map(self.made, items))
            case ["i", digits]:
                return int(digits)
            case ["e", shape, value] if issubclass(self._shapes[shape][0], Enum):
                return self._shapes[shape][0](value)
            case ["b", int(nbytes)] if 0 <= nbytes <= MOST_BYTES:
                return _zeros(nbytes)
            case ["=", number]:
                return self._made[number]
            case [_, number, *_] if isinstance(number, int):
                return self._shared(plain, number)
        raise ValueError(f"invalid value on a tape: {plain!r:.80}")

    def _shared(self, plain: list[Any], number: int) -> Any:
        found: Any
        match plain:
            case ["l", _, items]:
                found = self._made[number] = []
                found += map(self.made, items)
            case ["s", _, items]:
                found = self._made[number] = set()
                found.update(map(self.made, items))
            case ["q", _, longest, items]:
                found = self._made[number] = deque(maxlen=longest)
                found.extend(map(self.made, items))
            case ["c" | "d" as tag, _, made_by, pairs]:
                found = Counter() if tag == "c" else {}
                if made_by is not None and self._shapes[made_by][0] is Barrier:
                    found = defaultdict(Barrier)
                self._made[number] = found
                for key, value in pairs:
                    found[self.made(key)] = self.made(value)
            case ["o", _, shape, values]:
                kind, names = self._shapes[shape]
                found = self._made[number] = kind.__new__(kind)
                for name, value in zip(names, values, strict=True):
                    object.__setattr__(found, name, self.made(value))
            case _:
                raise ValueError(f"invalid value on a tape: {plain!r:.80}")
        return found


@cache
def _zeros(nbytes: int) -> memoryview:
    """A placeholder for bytes that are not on the tape, shared by all of one length."""
    return memoryview(bytes(nbytes))


# Events.


# Most events are about a chunk. Their fields are written directly: `Codec` takes several times as long,
# which would slow down a busy broker.
def _brief_chunk(event: events.Received) -> list[Any] | None:
    chunk, peer = event.message, event.peer
    if type(chunk) is not Chunk or chunk.version is not None or chunk.delta_of is not None:
        return None
    if type(event.payload) is Held:  # it has results of a relay, which are written in full
        return None
    whose = None if peer is None else (peer.role.value, peer.name)
    size = event.payload.nbytes
    return [
        "chunk",
        event.route,
        chunk.fragment,
        chunk.index,
        chunk.session,
        chunk.push_id,
        size,
        whose,
    ]


def _brief_done(event: events.WorkDone) -> list[Any]:
    work = event.work
    weight = work.weight if type(work) is effects.Fold else None
    where = work.fragment, work.index, work.worker_id, work.push_id
    size = work.payload.nbytes
    return ["done", *where, work.wire_dtype, size, weight, event.squares, event.fingerprint]


def _brief_stepped(event: events.Stepped) -> list[Any] | None:
    if type(event.wire) is Coded:
        return None
    return ["stepped", event.fragment, event.index, event.wire.nbytes, event.overflow]


# The fields of an event about a chunk; None if it has others, and is written by `Codec`.
_BRIEF: dict[type, Callable[[Any], list[Any] | None]] = {
    events.Received: _brief_chunk,
    events.WorkDone: _brief_done,
    events.Stepped: _brief_stepped,
}


def _of_brief(said: list[Any]) -> Event | None:
    match said:
        case ["chunk", route, fragment, index, session, push_id, size, whose]:
            peer = None if whose is None else Peer(Role(whose[0]), whose[1])
            chunk = Chunk(fragment, index, session=session, push_id=push_id)
            return events.Received(route, chunk, _zeros(size), peer)
        case ["done", fragment, index, worker_id, push_id, dtype, size, weight, squares, print_]:
            where, payload = (fragment, index, worker_id, push_id), _zeros(size)
            if weight is None:
                work: Any = effects.Inspect(*where, wire_dtype=dtype, payload=payload)
            else:
                work = effects.Fold(*where, weight=weight, wire_dtype=dtype, payload=payload)
            return events.WorkDone(work, squares, print_)
        case ["stepped", fragment, index, size, overflow]:
            return events.Stepped(fragment, index, _zeros(size), overflow)
    return None


# Effects.


def _of_send(send: effects.Send) -> Any:
    said, kind = send.message, type(send.message)
    if kind is Ack:
        ack: Any = said
        return send.route, ack.push_id, ack.fragment, ack.chunks, ack.credit, ack.lane
    if kind is Chunk:
        chunk: Any = said
        return send.route, chunk.fragment, chunk.index, chunk.parts
    return send.route, said


# The fields that are checksummed of frequent or large effects; all fields of the others.
_FIELDS: dict[type, Callable[[Any], Any]] = {
    effects.Send: _of_send,
    effects.Fold: lambda work: (work.fragment, work.index, work.worker_id, work.push_id),
    effects.Inspect: lambda work: (work.fragment, work.index, work.worker_id, work.push_id),
    effects.StoreInitial: lambda work: (work.fragment, work.index, work.worker_id, work.push_id),
    effects.Step: lambda step: (step.fragment, step.index, step.weight, step.count),
    effects.AggregateAndStep: lambda work: (
        work.fragment,
        work.index,
        tuple((each.push_id, each.weight, each.scale) for group in work.wholes for each in group),
        work.count,
    ),
    effects.Save: lambda save: save.number,  # its record only repeats the state
    effects.Finish: lambda finish: -1 if finish.save is None else finish.save.number,
}


def _gist(effect: Effect) -> tuple[str, Any]:
    """Kind and fields of an effect, without parameters, which it would keep in memory."""
    fields = _FIELDS.get(type(effect))
    kind = type(effect.message if type(effect) is effects.Send else effect).__name__
    return kind, effect if fields is None else fields(effect)


def _mark(gist: tuple[str, Any]) -> tuple[str, int]:
    kind, said = gist
    if isinstance(said, tuple) and isinstance(said[-1], Message):
        said = (*said[:-1], encode(said[-1]))
    elif not isinstance(said, tuple | int):
        said = _Freezer({}, shares=False).plain(said)
    return kind, crc32(repr(said).encode())


def mark(effect: Effect) -> tuple[str, int]:
    """Kind and CRC-32 of an effect; equal effects have equal marks in every process."""
    return _mark(_gist(effect))


def noted(event: Event, asked_for: Iterable[Effect] | None) -> tuple[Any, Any]:
    """Reduce an event and its effects to what `written` needs later."""
    brief = _BRIEF.get(type(event))
    said = (None if brief is None else brief(event)) or event
    return said, None if asked_for is None else list(map(_gist, asked_for))


def written(said: Any, now: Now, gists: Any, codec: Codec) -> tuple[Any, ...]:
    """Convert the result of `noted` to the plain values of an entry."""
    marks = None if gists is None else list(map(_mark, gists))
    if isinstance(said, list):
        return (), now.core, now.machine, said, marks
    plain = codec.freeze(said)
    return codec.new_shapes(), now.core, now.machine, plain, marks


@dataclass(frozen=True)
class Entry:
    """One event of a tape, with the marks of its effects; None: the core failed to handle it."""

    now: Now
    event: Event
    marks: tuple[tuple[str, int], ...] | None

    @classmethod
    def read(cls, plain: Sequence[Any], codec: Codec) -> Entry:
        """Restore an entry; raises ValueError, TypeError or LookupError for an invalid one."""
        shapes, core, machine, said, marks = plain
        codec.know(shapes)
        event = _of_brief(said) or codec.thaw(said)
        if not isinstance(event, get_args(Event)):
            raise ValueError("an entry has no event")
        found = None if marks is None else tuple((str(kind), int(sum_)) for kind, sum_ in marks)
        return cls(Now(float(core), float(machine)), event, found)


@dataclass(frozen=True)
class Difference:
    """The first effect that differs from the tape: effect `at`, counted from 0."""

    at: int
    was: str  # its kind on the tape; empty: the tape has no such effect
    became: str

    def __str__(self) -> str:
        return f"effect {self.at} was {self.was or 'none'} on the tape, now {self.became or 'none'}"


@dataclass(frozen=True)
class Step:
    """A replayed event: its subject, and the effects that the core requested this time."""

    entry: Entry
    about: story.Entry
    asked_for: Sequence[Effect]
    difference: Difference | None


def replay(core: Core, entries: Iterable[Entry]) -> Iterator[Step]:
    """Feed the events of a tape to a core; ends at the first difference, or at a recorded failure."""
    for entry in entries:
        about = story.entry_of(entry.event, core.state, entry.now.core)
        try:
            asked_for = core.handle(entry.event, entry.now)
        except (InvariantBroken, story.CoreError) as error:
            failed = None if entry.marks is None else Difference(0, "handled", str(error))
            yield Step(entry, about, (), failed)
            return
        difference = _difference(entry.marks, asked_for)
        yield Step(entry, about, asked_for, difference)
        if difference is not None:
            return


def _difference(
    marks: Sequence[tuple[str, int]] | None, asked_for: Sequence[Effect]
) -> Difference | None:
    if marks is None:
        return Difference(0, "an error", "handled")
    pairs = zip_longest(marks, map(mark, asked_for), fillvalue=("", 0))
    for at, (was, became) in enumerate(pairs):
        if was != became:
            other = f"another {became[0]}" if was[0] == became[0] else became[0]
            return Difference(at, was[0], other)
    return None
