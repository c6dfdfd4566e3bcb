"""Updates: each makes one version of one fragment, from a round of workers or from single pushes.

A round waits for workers at a *barrier*. Asynchronous mode has none: an update takes the pushes that are
ready.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from diloco_broker.core.effects import CountedPush, Fold, Inspect
from diloco_broker.core.relays.relay import Relay
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.messages import Push

PushKey = tuple[str, int]  # (worker id, push id)


class InvariantBroken(AssertionError):
    """A condition that must hold between events is violated; `worker_id` is empty or names a worker."""

    def __init__(self, text: str, worker_id: str = "") -> None:
        super().__init__(text)
        self.worker_id = worker_id


class Phase(str, Enum):
    """CLOSING: the contributions are fixed, and the outer step is being taken."""

    OPEN = "open"
    CLOSING = "closing"


@dataclass(eq=False)
class PushInProgress(ABC):
    """An accepted, unfinished push. Instances compare by identity."""

    worker_id: str
    push: Push
    before: Bitmap  # chunks that are already counted and need not be sent
    weight: float  # in a weighted mean
    # Versions between its base and the one that contains it; 0 until that is known.
    staleness: int = field(default=0, kw_only=True)
    arrived: Bitmap = field(init=False)  # chunks received, inspected or not
    taken: Bitmap = field(init=False)  # chunks received and found finite
    squares: float = field(default=0.0, init=False)  # sum of the squared parameters in these
    fingerprint: int = field(default=0, init=False)  # of these; 0 while all are zeros
    # Chunks that a relay holds and that have not been collected, by index.
    remote: dict[int, RemoteChunk] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.arrived = Bitmap(self.push.chunks)
        self.taken = Bitmap(self.push.chunks)

    @property
    def key(self) -> PushKey:
        return (self.worker_id, self.push.push_id)

    @property
    def held(self) -> Bitmap:
        return self.before | self.arrived

    @property
    def norm(self) -> float:
        """Euclidean norm of the taken chunks; the push has the one that its worker reported."""
        return math.sqrt(self.squares)

    def looked_at(self, index: int, squares: float, fingerprint: int) -> None:
        """A chunk was found finite: it counts unless the push is dropped."""
        self.taken.add(index)
        self.squares += squares
        self.fingerprint = (self.fingerprint + fingerprint) % 2**64  # chunks arrive in any order

    def hold(self, chunk: RemoteChunk, now: float) -> None:
        """A relay holds this chunk, and has found it finite. `now` is run time."""
        self.remote[chunk.index] = chunk

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Every chunk has arrived and is finite. A chunk that a relay holds counts as arrived."""

    @abstractmethod
    def work(self, index: int, payload: Any) -> Fold | Inspect:
        """The tensor work for a chunk that has arrived."""

    def check_invariants(self) -> None:
        if any(i in self.before for i in self.arrived):
            raise InvariantBroken(f"{self.key} counts a chunk again", self.worker_id)
        if not all(i in self.arrived for i in self.taken):
            raise InvariantBroken(f"{self.key} has taken what never arrived", self.worker_id)
        if not all(i in self.arrived for i in self.remote):
            raise InvariantBroken(
                f"{self.key} has a remote chunk that never arrived", self.worker_id
            )


@dataclass(frozen=True, eq=False)
class RemoteChunk:
    """A chunk of a push that a relay holds."""

    push: PushInProgress
    index: int
    relay: Relay
    number: int  # by which the relay knows it
    nbytes: int
    squares: float
    fingerprint: int


@dataclass
class Barrier:
    """The workers that the rounds of one fragment wait for. Only its methods change it."""

    expected: set[str] = field(default_factory=set)  # workers that the open round waits for
    # Workers whose push for the open or coming round was refused: it does not wait for them.
    skipped: set[str] = field(default_factory=set)

    def open(self, expected: set[str]) -> None:
        self.expected = expected

    def expect(self, worker_id: str) -> None:
        self.expected.add(worker_id)

    def expect_no_more(self, worker_id: str) -> None:
        self.expected.discard(worker_id)

    def skip(self, worker_id: str) -> None:
        self.skipped.add(worker_id)

    def has_begun(self, worker_id: str) -> None:
        """A push of it was accepted, perhaps after others were refused."""
        self.skipped.discard(worker_id)

    def end(self) -> None:
        """The round has ended; refusals do not affect the next one."""
        self.skipped.clear()


@dataclass
class Update(ABC):
    """An update, from its opening until its version is released."""

    number: int  # updates before it, of all fragments
    fragment: int
    size: int  # chunks of its fragment
    opened_at: float  # run time
    barrier: Barrier | None = None  # None in asynchronous mode
    phase: Phase = field(default=Phase.OPEN, init=False)
    stepped: Bitmap = field(init=False)  # chunks whose outer step has been taken
    # Workers were told that others are missing.
    is_lack_known: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.stepped = Bitmap(self.size)

    @property
    @abstractmethod
    def begun(self) -> set[str]:
        """Workers that the round no longer waits for: their push has begun, or was refused."""

    @property
    @abstractmethod
    def participating(self) -> set[str]:
        """Workers whose push is in progress or complete."""

    @property
    @abstractmethod
    def pushes(self) -> Iterable[PushInProgress]:
        """The pushes that its version contains, completely or in part."""

    @abstractmethod
    def has_all_of(self, worker_id: str) -> bool:
        """Whether all chunks of a push of this worker have arrived."""

    @property
    def has_work_to_look_at(self) -> bool:
        """Whether a push has arrived completely but has not been inspected completely."""
        return False

    @property
    def averaged(self) -> int:
        """The number of workers with a complete push in it."""
        return len({each.worker_id for each in self.pushes if each.is_whole})

    def counted(self) -> tuple[CountedPush, ...]:
        return tuple(
            CountedPush(
                worker_id=each.worker_id,
                push=each.push,
                chunks=each.before | each.taken,
                added=each.taken,
                weight=each.weight,
                staleness=each.staleness,
                norm=each.norm if each.taken.is_full else None,
                fingerprint=each.fingerprint if each.taken.is_full else 0,
            )
            for each in self.pushes
        )

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise AssertionError if a condition that must hold between events is violated."""

    @property
    def missing(self) -> set[str]:
        """Expected workers that have not begun."""
        barrier = self.barrier
        return barrier.expected - self.begun - barrier.skipped if barrier else set()

    @property
    def lacking(self) -> set[str]:
        """Expected workers whose push is missing for the round to close."""
        return self.missing
