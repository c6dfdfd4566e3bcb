"""The tape of a run: the state that it begins with, then every event with its time and what came of it.

Handling an event is a function of the state, the event and what the clocks say; randomness is a part of
the state (`Draws`). So a core that is made of a tape's first state does the same again, effect for
effect, and a run that went wrong elsewhere goes wrong here.

The bytes of parameters and pseudo-gradients are never on a tape, only how many they were; of a chunk
that was looked at, also their fingerprint. Session tokens are: whoever has the tape of a run that goes
on can speak for its workers.

What several records share they share again when a tape is read. It names classes, and only those of the
core, its options and the protocol are made, without a call of theirs: no code of a tape runs.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from hashlib import blake2b
from typing import Any

from diloco_broker.core import effects
from diloco_broker.core.effects import Effect
from diloco_broker.core.events import Event, Now
from diloco_broker.core.machine import Core
from diloco_protocol.messages import Ack, Chunk, encode

FORMAT = 1
# Modules whose classes are made anew; builtins are made by tags.
OURS = ("diloco_broker.core.", "diloco_broker.config.", "diloco_protocol.")
_PLAIN = frozenset({type(None), bool, float, str, bytes})
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1  # what msgpack takes as a whole number


@dataclass
class Draws:
    """Unpredictable numbers below 2**64, the same again for the same seed of 32 bytes."""

    seed: bytes
    count: int = 0

    def __call__(self) -> int:
        self.count += 1
        found = blake2b(self.count.to_bytes(8, "big"), digest_size=8, key=self.seed)
        return int.from_bytes(found.digest(), "big")


class NotPlain(TypeError):
    """Something that no tape can have."""


Shape = tuple[str, tuple[str, ...]]  # a class, and the names of an object's attributes


class Codec:
    """Turns what the core consists of into plain values fit for msgpack, and makes it anew.

    Plain values name shapes by their numbers. `new_shapes` are those that came up since it was asked
    last: they have to be written down before what uses them, and `know` them before it is read.
    """

    def __init__(self) -> None:
        self._numbers: dict[Shape, int] = {}
        self._shapes: list[tuple[Any, tuple[str, ...]]] = []
        self._written = 0

    def freeze(self, value: Any) -> Any:
        """Plain values for it; raises NotPlain where there are none."""
        return _Freezer(self._numbers).plain(value)

    def thaw(self, plain: Any) -> Any:
        """What was frozen; raises ValueError, TypeError or LookupError for what was not."""
        return _Thawer(self._shapes).made(plain)

    def new_shapes(self) -> list[Any]:
        found = [[title, list(names)] for title, names in list(self._numbers)[self._written :]]
        self._written = len(self._numbers)
        return found

    def know(self, shapes: Iterable[Any]) -> None:
        """Raises ValueError for a class that no tape has."""
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
    if not f"{module}.".startswith(OURS) or not isinstance(found, type):
        raise ValueError(f"a tape cannot have {title!r:.80}")
    return found


class _Freezer:
    """Of one value: what is in it twice is one object again afterwards."""

    def __init__(self, shapes: dict[Shape, int]) -> None:
        self._shapes = shapes
        self._numbers: dict[int, int] = {}  # of what may be shared, by identity

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
                raise NotPlain(f"{_title(kind)} is nothing that a tape can have")
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
            case ["e", shape, value]:
                return self._shapes[shape][0](value)
            case ["b", nbytes]:
                return _zeros(nbytes)
            case ["=", number]:
                return self._made[number]
            case [_, number, *_] if isinstance(number, int):
                return self._shared(plain, number)
        raise ValueError(f"{plain!r:.80} is nothing that a tape can have")

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
                factory = None if made_by is None else self._shapes[made_by][0]
                found = Counter() if tag == "c" else {} if factory is None else defaultdict(factory)
                self._made[number] = found
                for key, value in pairs:
                    found[self.made(key)] = self.made(value)
            case ["o", _, shape, values]:
                kind, names = self._shapes[shape]
                found = self._made[number] = object.__new__(kind)
                for name, value in zip(names, values, strict=True):
                    object.__setattr__(found, name, self.made(value))
            case _:
                raise ValueError(f"{plain!r:.80} is nothing that a tape can have")
        return found


@cache
def _zeros(nbytes: int) -> memoryview:
    """What stands for bytes that are not on the tape; those of one length are the same ones."""
    return memoryview(bytes(nbytes))


# What came of an event.


def mark(effect: Effect) -> tuple[str, int]:
    """What an effect is, and a checksum of what it says: equal ones have the same."""
    match effect:
        case effects.Send(route, Ack() as ack):
            return "Ack", zlib.crc32(b"%b %r" % (route, vars(ack)))
        case effects.Send(route, Chunk() as chunk):
            where = chunk.fragment, chunk.index, chunk.parts
            return "Chunk", zlib.crc32(b"%b %r" % (route, where))
        case effects.Send(route, message):
            return type(message).__name__, zlib.crc32(encode(message), zlib.crc32(route))
        case effects.AggregateAndStep(fragment, index, groups, count):
            names = [
                (each.worker_id, each.push_id, each.scale) for group in groups for each in group
            ]
            said: Any = fragment, index, names, count
        case effects.Fold() | effects.Inspect() | effects.StoreInitial():
            said = effect.fragment, effect.index, effect.worker_id, effect.push_id
        case effects.Save(number):
            said = number
        case effects.Finish(save):
            said = save and save.number
        case _:
            said = Codec().freeze(effect)
    return type(effect).__name__, zlib.crc32(repr(said).encode())


@dataclass(frozen=True)
class Entry:
    """One event of a tape. `marks` of what came of it; None: the core could not handle it."""

    now: Now
    event: Event
    marks: tuple[tuple[str, int], ...] | None

    def plain(self, codec: Codec) -> list[Any]:
        event = codec.freeze(self.event)
        marks = None if self.marks is None else [list(each) for each in self.marks]
        return [codec.new_shapes(), *self.now, event, marks]

    @classmethod
    def read(cls, plain: Sequence[Any], codec: Codec) -> Entry:
        """Raises ValueError, TypeError or LookupError for what is no entry."""
        shapes, core, machine, event, marks = plain
        codec.know(shapes)
        found = None if marks is None else tuple((str(kind), int(said)) for kind, said in marks)
        return cls(Now(core, machine), codec.thaw(event), found)


def entry_of(event: Event, now: Now, asked_for: Iterable[Effect] | None) -> Entry:
    marks = None if asked_for is None else tuple(map(mark, asked_for))
    return Entry(now, event, marks)


@dataclass(frozen=True)
class Difference:
    """Where a core does something else than the tape says: entry and effect by their numbers from 0."""

    number: int
    entry: Entry
    at: int
    was: str  # kinds of effect; empty: none
    became: str
    effect: Effect | None


def replay(
    core: Core, entries: Iterable[Entry], heard: Callable[[Entry, list[Effect]], bool]
) -> Difference | None:
    """Let a core handle what is on a tape; returns the first difference, None where there is none.

    `heard` gets each entry with what the core asks for, and says whether to go on.
    """
    for number, entry in enumerate(entries):
        try:
            asked_for: list[Effect] | None = core.handle(entry.event, entry.now)
        except Exception as error:
            if entry.marks is None:
                return None
            return Difference(number, entry, 0, "", repr(error), None)
        found = tuple(map(mark, asked_for or ()))
        if entry.marks is None or found != entry.marks:
            was = entry.marks or ()
            at = next(
                (i for i, pair in enumerate(zip(found, was, strict=False)) if pair[0] != pair[1]),
                min(len(found), len(was)),
            )
            return Difference(
                number,
                entry,
                at,
                was[at][0] if at < len(was) else "",
                found[at][0] if at < len(found) else "",
                asked_for[at] if asked_for and at < len(asked_for) else None,
            )
        if not heard(entry, asked_for or []):
            return None
    return None
