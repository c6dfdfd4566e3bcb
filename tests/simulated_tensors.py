"""Tensor work in a simulated run: instead of adding numbers, it keeps which pushes are in which chunk.

The *contents* of a chunk are the pushes that it has ever averaged, so each piece of work can be checked
for what matters: that a push is added once, with its weight, and that a sum is divided by what is in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from diloco_broker.config import BrokerConfig
from diloco_broker.events import (
    Event,
    Fold,
    Folded,
    FoldRefused,
    Inspect,
    Inspected,
    InspectRefused,
    Merge,
    Part,
    Place,
    Placed,
    Step,
    Stepped,
    Work,
)
from diloco_protocol.messages import Push
from diloco_protocol.version import VersionId

Key = tuple[str, int]  # (worker id, push id)
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
class Wire:
    """One finished chunk: the pushes it has averaged."""

    spot: Spot
    contents: frozenset[Key]
    nbytes: int = CHUNK_BYTES


@dataclass
class Record:
    """What became of one push.

    Attributes:
        process: the name of the worker's process.
        weight: what it counts in a mean.
        offered_at: seconds.
        taken: its chunks that the broker has found finite.
        whole_at: when the broker had all of it; None before.
        counted_in: the version that contains it whole.
        ending: "counted", or the code it was refused with, as its worker was told.
    """

    process: str
    push: Push
    weight: float
    offered_at: float
    taken: set[int] = field(default_factory=set)
    whole_at: float | None = None
    counted_in: VersionId | None = None
    ending: str | None = None

    def __str__(self) -> str:
        push = self.push
        return (
            f"push {push.push_id:#x} of {self.process}, fragment {push.fragment}, base {push.base}, "
            f"offered at {self.offered_at:.2f}, whole at {self.whole_at}, in {self.counted_in}, its "
            f"worker heard {self.ending}"
        )


class Tensors:
    """The tensors of one life of a broker.

    Attributes:
        records: all pushes that were ever offered.
        versions: the current version of each fragment.
        added: by fragment, what its coming version has more than its current one: chunks by push.
    """

    def __init__(self, config: BrokerConfig, records: dict[Key, Record]) -> None:
        self.config = config
        self.records = records
        self.versions: dict[int, VersionId] = {}
        self.added: dict[int, dict[Key, set[int]]] = {}
        self._contents: dict[Spot, frozenset[Key]] = {}
        self._sums: dict[Spot, dict[Key, float]] = {}  # accumulators: the weight of each push
        self._gradients: Counter[int] = Counter()  # that the outer optimizer has had, by fragment
        self._coming: Counter[int] = Counter()  # those of the version being made

    def carry_out(self, work: Work) -> Event:
        """Do a piece of work; raises Violation when it must not be done."""
        spot = (work.fragment, work.index)
        match work:
            case Place(payload=payload):
                if payload is not None:
                    demand(payload.spot == spot, "chunk {} is placed as {}", payload.spot, spot)
                self._contents[spot] = payload.contents if payload else frozenset()
                return Placed(work, Wire(spot, self._contents[spot]))
            case Fold(worker_id=worker_id, push_id=push_id, weight=weight, payload=payload):
                key = (worker_id, push_id)
                if not self._is_good(spot, key, payload):
                    return FoldRefused(work)
                self._weighs(key, weight)
                sums = self._sums.setdefault(spot, {})
                demand(key not in sums, "{} is added twice to chunk {}", key, spot)
                sums[key] = weight
                return Folded(work)
            case Step(weight=weight, count=count):
                parts = self._sums.pop(spot, {})
                total = sum(parts.values())
                fits = abs(total - weight) <= 1e-9 * max(1.0, total)
                demand(fits, "chunk {} is divided by {}, its weight is {}", spot, weight, total)
                return self._step(spot, parts, count, gradients=1)
            case Inspect(worker_id=worker_id, push_id=push_id, payload=payload):
                if not self._is_good(spot, (worker_id, push_id), payload):
                    return InspectRefused(work)
                return Inspected(work, payload.squares)
            case Merge(groups=groups, count=count):
                self._check_merge(work)
                keys = [(part.worker_id, part.push_id) for group in groups for part in group]
                demand(len(keys) == len(set(keys)), "{} merges one push twice: {}", spot, keys)
                return self._step(spot, keys, count, gradients=len(groups))

    def release(self, fragment: int, version: VersionId) -> dict[Key, set[int]]:
        """A version is whole; returns what it has more than the one before: chunks by push."""
        self._gradients[fragment] += self._coming.pop(fragment, 0)
        self.versions[fragment] = version
        return self.added.pop(fragment, {})

    def staleness(self, record: Record) -> int:
        """Versions between a push's base and the current one of its fragment."""
        base, current = record.push.base, self.versions[record.push.fragment]
        return max(0, current.counter - base.counter) if base else 0

    def _is_good(self, spot: Spot, key: Key, payload: Delta) -> bool:
        right = payload.key == key and payload.spot == spot
        demand(right, "{} is taken for chunk {} of {}", payload, spot, key)
        if payload.is_finite:
            self.records[key].taken.add(spot[1])
        return payload.is_finite

    def _weighs(self, key: Key, weight: float) -> None:
        right = self.records[key].weight
        demand(weight == right, "{} weighs {} instead of {}", key, weight, right)

    def _check_merge(self, work: Merge) -> None:
        everyone = [part for group in work.groups for part in group]
        if not self.config.is_async:
            order = [part.worker_id for part in everyone]
            demand(order == sorted(set(order)), "merged out of order: {}", order)
            demand(len(work.groups) == 1, "a round of {} gradients", len(work.groups))
        elif not self.config.grace:
            demand(len(everyone) == 1, "{} pushes merged at a time", len(everyone))
        for part in everyone:
            self._check_part((work.fragment, work.index), part)

    def _check_part(self, spot: Spot, part: Part) -> None:
        key = (part.worker_id, part.push_id)
        record = self.records[key]
        self._weighs(key, part.weight)
        is_here = part.payload is not None and part.payload.spot == spot
        demand(is_here, "{} is merged without its chunk {}", key, spot)
        demand(record.whole_at is not None, "half a push is merged: {}", record)
        length = float(record.push.chunks) ** 0.5  # each chunk has squares 1
        demand(abs(part.norm - length) < 1e-9, "{} has norm {}, not {}", key, part.norm, length)
        stale, limit = self.staleness(record), self.config.max_staleness
        demand(limit is None or stale <= limit, "{} versions old and merged: {}", stale, record)
        scale = (1 + stale) ** -0.5 if self.config.staleness_weight == "poly" else 1.0
        demand(abs(part.scale - scale) < 1e-9, "{} is scaled by {}, not {}", key, part.scale, scale)

    def _step(self, spot: Spot, keys: Iterable[Key], count: int, *, gradients: int) -> Stepped:
        fragment, index = spot
        had = self._gradients[fragment]
        demand(
            count == had, "the optimizer of {} is told {} gradients, it had {}", spot, count, had
        )
        self._coming[fragment] = gradients
        before = self._contents[spot]
        for key in keys:
            demand(key not in before, "{} is counted twice in {}", key, spot)
            self.added.setdefault(fragment, {}).setdefault(key, set()).add(index)
        self._contents[spot] = before | set(keys)
        return Stepped(fragment, index, Wire(spot, self._contents[spot]))
