"""What is made next: one update of one fragment, by a round of workers or by pushes on their own.

A round waits for workers at a *barrier*. Asynchronous mode has none: there an update is made of the
pushes that are ready.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from diloco_broker.core.effects import CountedPush, Fold, Inspect
from diloco_broker.core.relays.relay import RemoteChunk
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.messages import Push

PushKey = tuple[str, int]  # (worker id, push id)


class InvariantBroken(AssertionError):
    """Something does not hold that must between two events; in the part of `worker_id`, if of one."""

    def __init__(self, text: str, worker_id: str = "") -> None:
        super().__init__(text)
        self.worker_id = worker_id


class Phase(str, Enum):
    """CLOSING: it is settled who contributes, and the outer step is being taken."""

    OPEN = "open"
    CLOSING = "closing"


@dataclass(eq=False)
class PushInProgress(ABC):
    """A push that was taken in and is not over. Two are the same only if they are one object."""

    worker_id: str
    push: Push
    before: Bitmap  # chunks that need not come: what they bring is counted already
    weight: float  # its share in a mean
    # Versions between its base and the one that it goes into; 0 until that is settled.
    staleness: int = field(default=0, kw_only=True)
    arrived: Bitmap = field(init=False)  # chunks received, taken or waiting to be
    taken: Bitmap = field(init=False)  # chunks received and found finite
    squares: float = field(default=0.0, init=False)  # sum of the squared parameters in these
    fingerprint: int = field(default=0, init=False)  # of these together; 0 while all are zeros
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
        """Euclidean length of the parameters taken; what its worker says of it is in the push."""
        return math.sqrt(self.squares)

    def looked_at(self, index: int, squares: float, fingerprint: int) -> None:
        """A chunk was found finite: it counts, unless the push is given up."""
        self.taken.add(index)
        self.squares += squares
        self.fingerprint = (self.fingerprint + fingerprint) % 2**64  # chunks come in any order

    def hold(self, chunk: RemoteChunk, now: float) -> None:
        """A relay holds this chunk, and has found it finite. `now` is run time."""
        self.remote[chunk.index] = chunk

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Every chunk has arrived and is finite. A chunk that a relay holds counts as arrived."""

    @abstractmethod
    def work(self, index: int, payload: Any) -> Fold | Inspect:
        """What is to be done with a chunk that has just come."""

    def check_invariants(self) -> None:
        if any(i in self.before for i in self.arrived):
            raise InvariantBroken(f"{self.key} counts a chunk again", self.worker_id)
        if not all(i in self.arrived for i in self.taken):
            raise InvariantBroken(f"{self.key} has what never arrived", self.worker_id)
        if not all(i in self.arrived for i in self.remote):
            raise InvariantBroken(
                f"{self.key} has a remote chunk that never arrived", self.worker_id
            )


@dataclass
class Barrier:
    """Whom the rounds of one fragment wait for. Only the methods here change it."""

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
        """A push of it was taken in, after others were refused perhaps."""
        self.skipped.discard(worker_id)

    def end(self) -> None:
        """The round is over; refusals count for this one only."""
        self.skipped.clear()


@dataclass
class Update(ABC):
    """One update, from when it opens until its version is released."""

    number: int  # updates before it, of all fragments
    fragment: int
    size: int  # chunks of its fragment
    opened_at: float  # run time
    barrier: Barrier | None = None  # whom it waits for; None in asynchronous mode
    phase: Phase = field(default=Phase.OPEN, init=False)
    stepped: Bitmap = field(init=False)  # chunks of which the outer step has been taken
    is_lack_known: bool = field(default=False, init=False)  # workers know that it lacks others

    def __post_init__(self) -> None:
        self.stepped = Bitmap(self.size)

    @property
    @abstractmethod
    def begun(self) -> set[str]:
        """Workers that are not waited for any longer: their push has begun, or was refused."""

    @property
    @abstractmethod
    def participating(self) -> set[str]:
        """Workers whose push is under way or whole."""

    @property
    @abstractmethod
    def pushes(self) -> Iterable[PushInProgress]:
        """Those that its version contains, whole or in part."""

    @abstractmethod
    def has_all_of(self, worker_id: str) -> bool:
        """Is a push of this worker here that misses nothing?"""

    @property
    def has_work_to_look_at(self) -> bool:
        """Is a push here, of which nothing but our own look at it is missing?"""
        return False

    @property
    def averaged(self) -> int:
        """Workers of whom a whole push is in it."""
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
        """Raise AssertionError when something does not hold that must between two events."""

    @property
    def missing(self) -> set[str]:
        """Expected workers that have not begun."""
        barrier = self.barrier
        return barrier.expected - self.begun - barrier.skipped if barrier else set()
