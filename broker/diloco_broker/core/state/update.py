"""What is made next: one update of one fragment, by a round of workers or by pushes on their own.

A round waits for workers at a *barrier*. Asynchronous mode has none: there an update is made of the
pushes that are ready.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from diloco_protocol.bitmap import Bitmap
from diloco_protocol.messages import Push

PushKey = tuple[str, int]  # (worker id, push id)


class Phase(str, Enum):
    """CLOSING: it is settled who contributes, and the outer step is being taken."""

    OPEN = "open"
    CLOSING = "closing"


@dataclass(frozen=True)
class CountedPush:
    """What an update counts of one push.

    Attributes:
        chunks: those that the ledger names from now on.
        added: those of which its values are in this update's version.
        weight: their share.
        staleness: versions between the push's base and the one that it goes into.
    """

    worker_id: str
    push: Push
    chunks: Bitmap
    added: Bitmap
    weight: float
    staleness: int


@dataclass
class Barrier:
    """Whom the rounds of one fragment wait for. Only the methods here change it.

    Attributes:
        expected: workers that the open round waits for.
        skipped: workers whose push for the open or coming round was refused: it does not wait for them.
    """

    expected: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)

    def open(self, expected: set[str]) -> None:
        """A round opens that waits for these."""
        self.expected = expected

    def expect(self, worker_id: str) -> None:
        self.expected.add(worker_id)

    def expect_no_more(self, worker_id: str) -> None:
        self.expected.discard(worker_id)

    def skip(self, worker_id: str) -> None:
        """Its push was refused."""
        self.skipped.add(worker_id)

    def has_begun(self, worker_id: str) -> None:
        """A push of it was taken in, after others were refused perhaps."""
        self.skipped.discard(worker_id)

    def end(self) -> None:
        """The round is over; refusals count for this one only."""
        self.skipped.clear()


@dataclass
class Update(ABC):
    """One update, from when it opens until its version is released.

    Attributes:
        number: updates before it, of all fragments.
        size: chunks of its fragment.
        barrier: whom it waits for; None in asynchronous mode.
        stepped: chunks of which the outer step has been taken.
    """

    number: int
    fragment: int
    size: int
    opened_at: float
    barrier: Barrier | None = None
    phase: Phase = field(default=Phase.OPEN, init=False)
    stepped: Bitmap = field(init=False)

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
    def averaged(self) -> int:
        """Workers of whom a whole push is in it."""

    @abstractmethod
    def counted(self) -> Iterator[CountedPush]:
        """What its version contains through it."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise AssertionError when something does not hold that must between two events."""

    @property
    def missing(self) -> set[str]:
        """Expected workers that have not begun."""
        barrier = self.barrier
        return barrier.expected - self.begun - barrier.skipped if barrier else set()
