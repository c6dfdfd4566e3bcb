"""Tensor work in a simulated run: instead of adding numbers, it keeps which pushes are in which chunk.

The *contents* of a chunk are the pushes that it has ever averaged, so each piece of work can be checked
for what matters: that a push is added once, with its weight, and that a sum is divided by what is in it.
What the outer optimizer remembers is how many gradients it has had, and which are still in its buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.core import effects, events
from diloco_broker.core.versions.reply import Coded
from diloco_broker.shell.tensor_work.queue import WorkQueue
from diloco_broker.storage.checkpoint_format import Checkpoint
from diloco_broker.storage.resume import put_back
from diloco_broker.tensors.parameters import FragmentTensors
from diloco_protocol.dtypes import is_quantized
from diloco_protocol.messages import Push
from diloco_protocol.version import VersionId
from simulation.contents import Contents, Key

Spot = tuple[int, int]  # (fragment, chunk)

# Bytes of a chunk of parameters on its way down, as the stage cuts them: four elements in fp32.
CHUNK_BYTES = 16


class Violation(AssertionError):
    """A promise was broken."""


def demand(holds: bool, sentence: str, *values: object) -> None:
    """Raise Violation unless it holds; the values are put into the sentence only then."""
    if not holds:
        raise Violation(sentence.format(*values))


@dataclass(frozen=True)
class Delta:
    """One chunk of a push on its way up. `squares` is the sum of its squared values."""

    key: Key
    spot: Spot
    nbytes: int
    is_finite: bool = True
    squares: float = 1.0


@dataclass(frozen=True)
class Sum:
    """The mean that a relay has made of a chunk, each with its weight."""

    parts: tuple[tuple[Delta, float], ...]
    nbytes: int


def parts_of(payload: Delta | Sum, weight: float) -> tuple[tuple[Delta, float], ...]:
    """What is in a chunk or in a mean, each with its weight."""
    return payload.parts if isinstance(payload, Sum) else ((payload, weight),)


def _is_sum(part: effects.WholePush, index: int) -> bool:
    """Has a relay sent this? Of one push it is that push's chunk."""
    payload = part.payloads[index]
    return isinstance(payload, Sum) or payload.key != (part.worker_id, part.push_id)


def _keys_of(part: effects.WholePush, index: int) -> list[Key]:
    return [each.key for each, _ in parts_of(part.payloads[index], part.weight)]


@dataclass(frozen=True)
class Wire:
    """One finished chunk: the pushes it has averaged."""

    spot: Spot
    contents: Contents
    nbytes: int = CHUNK_BYTES


@dataclass(frozen=True)
class Code:
    """What leads from a chunk of one version to that of the next."""

    before: Contents
    after: Contents
    nbytes: int = 1

    @property
    def parts(self) -> tuple[Code, ...]:
        return (self,)


@dataclass(frozen=True)
class Codes:
    """Some of them, one behind the other."""

    parts: tuple[Code, ...]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.parts)


@dataclass(frozen=True, eq=False)
class CodedWire(Coded):
    """A finished chunk where replies are quantized."""

    def joined(self, codes: Sequence[Any]) -> Any:
        return Codes(tuple(codes))

    @property
    def contents(self) -> Contents:
        assert isinstance(self.whole, Wire)
        return self.whole.contents

    @property
    def nbytes(self) -> int:
        assert isinstance(self.whole, Wire)
        return self.whole.nbytes


def as_held(wires: Iterable[Any]) -> tuple[Wire, ...]:
    """The chunks as a worker holds them."""
    return tuple(wire.whole if isinstance(wire, CodedWire) else wire for wire in wires)


@dataclass(frozen=True)
class Memory:
    """What the outer optimizer remembers of one chunk."""

    gradients: int = 0  # how many it has had
    buffer: tuple[Key, ...] = ()  # collected and not applied, each by a push that is in it


@dataclass
class Record:
    """The history of one push. Times are seconds."""

    process: str  # the name of the worker's process
    push: Push
    weight: float  # what it counts in a mean
    offered_at: float
    taken: set[int] = field(default_factory=set)  # chunks that the broker has found finite
    # Chunks that need not come: an earlier push of its worker has its vote there.
    spared: dict[int, Key] = field(default_factory=dict)
    whole_at: float | None = None  # when the broker had all of it
    counted_in: VersionId | None = None  # the version with it whole, if this incarnation made it
    ending: str | None = None  # "counted" or the code of its refusal, as its worker was told
    told_in_incarnation: int = 0  # of the broker
    was_at_relay: bool = False  # which may be gone, with its worker
    is_lost: bool = False  # a broker came back without the version that it was counted in

    def is_in(self, key: Key, index: int, wire: Wire) -> bool:
        """Whether a chunk of this push, or the one that spares it, is in a version."""
        return key in wire.contents or self.spared.get(index, key) in wire.contents

    def is_whole_in(self, key: Key, wires: Iterable[Wire]) -> bool:
        return all(self.is_in(key, index, wire) for index, wire in enumerate(wires))

    def __str__(self) -> str:
        push = self.push
        return (
            f"push {push.push_id:#x} of {self.process}, fragment {push.fragment}, base {push.base}, "
            f"offered at {self.offered_at:.2f}, whole at {self.whole_at}, in {self.counted_in}, its "
            f"worker heard {self.ending}"
        )


class Copies(dict[Key, Record]):
    """The records as they are now, for a broker that the referee does not follow any more."""

    def __init__(self, records: dict[Key, Record]) -> None:
        super().__init__({key: replace(each, taken={*each.taken}) for key, each in records.items()})
        self._records = records

    def __missing__(self, key: Key) -> Record:
        self[key] = replace(self._records[key], taken=set())
        return self[key]


class Tensors:
    """The tensors of one incarnation of a broker; it has what `Parameters` has for checkpoints.

    `records` are all pushes that were ever offered, `checkpoint` is what the incarnation began with.
    """

    def __init__(
        self, config: BrokerConfig, records: dict[Key, Record], checkpoint: Checkpoint | None = None
    ) -> None:
        self.config = config
        self.queue = WorkQueue()
        self._checkpoint = checkpoint
        self.records = records
        self.versions: dict[int, VersionId] = {}  # the current one of each fragment
        # By fragment, what its coming version has more than its current one: chunks by push.
        self.added: dict[int, dict[Key, set[int]]] = {}
        self._contents: dict[Spot, Contents] = {}
        self._memories: dict[Spot, Memory] = {}
        self._sums: dict[Spot, dict[Key, float]] = {}  # accumulators: the weight of each push

    # Checkpoints.

    def fragment_tensors(self, fragment: int) -> FragmentTensors:
        """The contents of the fragment's chunks, which never change, and the memory of each."""
        spots = sorted(spot for spot in self._contents if spot[0] == fragment)
        chunks: list[Any] = [self._contents[spot] for spot in spots]
        memories: list[Any] = [self._memory_of(spot) for spot in spots]
        return FragmentTensors(chunks, {"memory": memories})

    def _memory_of(self, spot: Spot) -> Memory:
        """Of chunks adopted from workers, which have had no step since, it is as in `_step`."""
        found = self._memories.get(spot)
        if found is not None:
            return found
        gradients = self._contents[spot].depth
        return Memory(gradients - gradients % self.config.dn_size)

    def wires(self, fragment: int) -> list[Any]:
        """The fragment's chunks as they are sent."""
        spots = sorted(spot for spot in self._contents if spot[0] == fragment)
        return [self._sent(spot) for spot in spots]

    def _sent(self, spot: Spot, before: Contents | None = None) -> Any:
        """A chunk as it is sent; `before` is what the version had that it was made from."""
        contents = self._contents[spot]
        wire = Wire(spot, contents)
        if not is_quantized(self.config.reply_dtype):
            return wire
        return CodedWire(wire, None if before is None else Code(before, contents), 0)

    def put_back(self, fragment: int, kept: FragmentTensors) -> None:
        contents: Sequence[Any] = kept.chunks
        memories: Sequence[Any] = kept.outer["memory"]
        for index, each in enumerate(contents):
            self._contents[fragment, index] = each
            self._memories[fragment, index] = memories[index]

    # What the core asks for.

    def add(self, work: effects.TensorWork | effects.AtOnce) -> None:
        match work:
            case effects.SetOuterOptimizer():
                raise AssertionError("a simulated broker has no operator")
            case effects.Revert(fragment):
                if self._checkpoint is not None:
                    put_back(self, fragment, self._checkpoint)
            case effects.ForgetBuffer(fragment):
                for spot in [spot for spot in self._memories if spot[0] == fragment]:
                    self._memories[spot] = Memory(self._memories[spot].gradients)
            case _:
                self.queue.add(work)

    def do_one(self) -> events.Event:
        """Do the next piece of work; raises Violation when it must not be done."""
        work = self.queue.take()
        spot = (work.fragment, work.index)
        match work:
            case effects.StoreInitial(payload=payload):
                if payload is not None:
                    demand(payload.spot == spot, "chunk {} is placed as {}", payload.spot, spot)
                return events.InitialStored(
                    work, self._place(spot, payload.contents if payload else Contents())
                )
            case effects.Fold(worker_id=worker_id, push_id=push_id, weight=weight, payload=payload):
                key = (worker_id, push_id)
                if worker_id:
                    if not self._is_good(spot, key, payload):
                        return events.WorkRefused(work)
                    self._adds(spot, key, weight)
                    return events.WorkDone(work, payload.squares)
                self._check_sum(spot, payload, weight)
                for part, each in parts_of(payload, weight):
                    self._adds(spot, part.key, each)
                return events.WorkDone(work, 0.0)
            case effects.Step(weight=weight, count=count):
                parts = self._sums.pop(spot, {})
                total = sum(parts.values())
                fits = abs(total - weight) <= 1e-9 * max(1.0, total)
                demand(fits, "chunk {} is divided by {}, its weight is {}", spot, weight, total)
                voters = [worker_id for worker_id, _ in parts]
                once = len(set(voters)) == len(voters)
                demand(once, "a worker has two votes on chunk {}: {}", spot, voters)
                return self._step(spot, [list(parts)], count)
            case effects.Inspect(worker_id=worker_id, push_id=push_id, payload=payload):
                if not self._is_good(spot, (worker_id, push_id), payload):
                    return events.WorkRefused(work)
                return events.WorkDone(work, payload.squares)
            case effects.AggregateAndStep(groups=groups, count=count):
                self._check_merge(work)
                keys = [
                    [key for part in group for key in _keys_of(part, work.index)]
                    for group in groups
                ]
                return self._step(spot, keys, count)

    def release(self, fragment: int, version: VersionId) -> dict[Key, set[int]]:
        """A version is whole; returns what it has more than the one before: chunks by push."""
        self.versions[fragment] = version
        return self.added.pop(fragment, {})

    def staleness(self, record: Record) -> int:
        """Versions between a push's base and the current one of its fragment."""
        base, current = record.push.base, self.versions[record.push.fragment]
        return max(0, current.counter - base.counter) if base else 0

    def _place(self, spot: Spot, contents: Contents) -> Any:
        """Parameters take the place of those from a checkpoint, which are some gradients behind."""
        memory = self._memories.get(spot)
        if memory is not None:
            steps = contents.depth - self._contents[spot].depth
            self._memories[spot] = Memory(memory.gradients + steps, memory.buffer)
        self._contents[spot] = contents
        return self._sent(spot)

    def _is_good(self, spot: Spot, key: Key, payload: Delta) -> bool:
        right = payload.key == key and payload.spot == spot
        demand(right, "{} is taken for chunk {} of {}", payload, spot, key)
        if payload.is_finite:
            self.records[key].taken.add(spot[1])
        return payload.is_finite

    def _adds(self, spot: Spot, key: Key, weight: float) -> None:
        self._weighs(key, weight)
        sums = self._sums.setdefault(spot, {})
        demand(key not in sums, "{} is added twice to chunk {}", key, spot)
        sums[key] = weight

    def _check_sum(self, spot: Spot, payload: Delta | Sum, weight: float) -> None:
        """What a relay has sent is of this chunk, and weighs what its parts do."""
        parts = parts_of(payload, weight)
        demand(all(each.spot == spot for each, _ in parts), "{} is taken for {}", payload, spot)
        total = sum(each for _, each in parts)
        demand(abs(total - weight) <= 1e-9 * max(1.0, total), "{} weighs {}", payload, weight)

    def _weighs(self, key: Key, weight: float) -> None:
        right = self.records[key].weight
        demand(weight == right, "{} weighs {} instead of {}", key, weight, right)

    def _check_merge(self, work: effects.AggregateAndStep) -> None:
        everyone = [part for group in work.groups for part in group]
        spot = (work.fragment, work.index)
        sums = [each for each in everyone if _is_sum(each, work.index)]
        for each in sums:
            self._check_sum(spot, each.payloads[work.index], each.weight)
            for delta, weight in parts_of(each.payloads[work.index], each.weight):
                self._weighs(delta.key, weight)
                whole = self.records[delta.key].whole_at
                demand(whole is not None, "half a push is merged: {}", delta.key)
        everyone = [each for each in everyone if each not in sums]
        if not self.config.is_async:
            order = [part.worker_id for part in everyone]
            demand(order == sorted(set(order)), "merged out of order: {}", order)
            demand(len(work.groups) == 1, "a round of {} gradients", len(work.groups))
        elif not self.config.fixed_grace:
            demand(len(everyone) == 1, "{} pushes merged at a time", len(everyone))
        for part in everyone:
            self._check_part((work.fragment, work.index), part)

    def _check_part(self, spot: Spot, part: effects.WholePush) -> None:
        key = (part.worker_id, part.push_id)
        record = self.records[key]
        self._weighs(key, part.weight)
        payload = part.payloads[spot[1]]
        is_here = payload is not None and payload.spot == spot
        demand(is_here, "{} is merged without its chunk {}", key, spot)
        demand(record.whole_at is not None, "half a push is merged: {}", record)
        # Each chunk has squares 1; where a relay has lost a part, the rest was counted before.
        length = sum(each is not None for each in part.payloads) ** 0.5
        demand(abs(part.norm - length) < 1e-9, "{} has norm {}, not {}", key, part.norm, length)
        stale, limit = self.staleness(record), self.config.max_staleness
        demand(limit is None or stale <= limit, "{} versions old and merged: {}", stale, record)
        scale = (1 + stale) ** -0.5 if self.config.staleness_weight == "poly" else 1.0
        demand(abs(part.scale - scale) < 1e-9, "{} is scaled by {}, not {}", key, part.scale, scale)

    def _step(self, spot: Spot, groups: Sequence[Sequence[Key]], count: int) -> events.Stepped:
        """Apply one gradient of each group; `count` is how many there were before, as the core says."""
        fragment, index = spot
        # A version that workers held has had as many as its name says, and nothing is left of a buffer.
        found = Memory(count - count % self.config.dn_size)
        memory, before = self._memories.get(spot, found), self._contents[spot]
        had = memory.gradients
        demand(
            count == had, "the optimizer of {} is told {} gradients, it had {}", spot, count, had
        )
        keys = [key for group in groups for key in group]
        demand(len(keys) == len(set(keys)), "{} merges one push twice: {}", spot, keys)
        for key in keys:
            demand(key not in before, "{} is counted twice in {}", key, spot)
            self.added.setdefault(fragment, {}).setdefault(key, set()).add(index)
        buffer = memory.buffer
        applied: list[Key] = []
        if self.config.dn_size > 1:
            for number, group in enumerate(groups, start=count + 1):
                buffer += tuple((f"buffer with {who}", push) for who, push in group[:1])
                if number % self.config.dn_size == 0:
                    applied += buffer
                    buffer = ()
        for gradient in applied:
            once = gradient not in before
            demand(once, "the optimizer of {} applies its {} a second time", spot, gradient)
        self._memories[spot] = Memory(had + len(groups), buffer)
        self._contents[spot] = before.plus([*keys, *applied])
        return events.Stepped(fragment, index, self._sent(spot, before))
