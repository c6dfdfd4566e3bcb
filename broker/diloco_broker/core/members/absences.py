"""Workers that the run lacks: those that died, left, or will rejoin. For displays only.

A death stays on record until its worker comes back, another worker takes its place, or an operator kicks
it. Otherwise a run that lost half of its workers in the night would look healthy in the morning.

A joining worker that is on record takes its own place. One that is not takes that of another worker, so
the records and the living together never outnumber `--max-workers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from diloco_broker.core.members.members import Member

# Deaths on record. Each is published once a second, and a fleet of spot instances loses many workers.
MOST_DEAD = 100
# Seconds: long enough for an operator to see a death the next morning, or after a day off.
KEPT_S = 48 * 3600.0


@dataclass(frozen=True)
class Death:
    """A worker as it was when it died: when (the core's clock), and why, as a clause."""

    member: Member
    at: float
    why: str


@dataclass
class Absences:
    """Attributes:
    dead: by worker id, the earliest death first.
    left: ids of workers that left properly, or were kicked, and whose place no other worker has taken,
        the earliest first. They lower the number of workers that are due.
    returning: ids of workers that are gone and still due: those that were told to rejoin, that left to
        join anew, or that were here or missing when the checkpoint was taken.
    """

    dead: dict[str, Death] = field(default_factory=dict)
    left: dict[str, None] = field(default_factory=dict)
    returning: dict[str, None] = field(default_factory=dict)

    def died(self, member: Member, why: str, now: float) -> None:
        """Record that a worker is gone and should be here."""
        member.forget_work()
        self.dead.pop(member.worker_id, None)
        self.dead[member.worker_id] = Death(member, now, why)
        while len(self.dead) > MOST_DEAD:
            self._forget(next(iter(self.dead)))

    def left_properly(self, member: Member) -> None:
        """Record that a worker is gone and need not come back."""
        self.left[member.worker_id] = None

    def will_return(self, member: Member) -> None:
        """Record that a worker is gone and will rejoin."""
        self.returning[member.worker_id] = None

    def joined(self, member: Member) -> None:
        """Record that a worker joined: in its own place, or else in that of the longest dead or gone."""
        records: tuple[dict[str, Any], ...] = (self.dead, self.left, self.returning)
        for record in records:
            if member.worker_id in record:
                del record[member.worker_id]
                return
        for record in records:
            if record:
                del record[next(iter(record))]
                return

    def kicked(self, worker_id: str) -> bool:
        """An operator no longer counts on a dead worker. False if it is not one of the dead."""
        is_dead = self.dead.pop(worker_id, None) is not None
        if is_dead:
            self.left[worker_id] = None
        return is_dead

    def recount(self) -> None:
        """An operator has set `--workers` anew: departures so far do not lower it."""
        self.returning |= self.left
        self.left.clear()

    @property
    def missing(self) -> tuple[str, ...]:
        """Ids of workers that are gone and still due."""
        return (*self.dead, *self.returning)

    def restore(self, left: Iterable[str], due: Iterable[str]) -> None:
        """Continue from a checkpoint: these workers had left, and those were here or missing."""
        self.left = dict.fromkeys(left)
        self.returning = {worker_id: None for worker_id in due if worker_id not in self.left}

    def due(self, wanted: int, alive: int) -> int:
        """How many workers should be alive, of `wanted` (`--workers`), where `alive` are."""
        return max(wanted - len(self.left), alive + len(self.dead))

    def tick(self, now: float) -> None:
        """Time has passed: remove old deaths."""
        for worker_id, death in list(self.dead.items()):
            if now - death.at <= KEPT_S:
                break
            self._forget(worker_id)

    def _forget(self, worker_id: str) -> None:
        """Show a death no longer; its worker is still due."""
        del self.dead[worker_id]
        self.returning[worker_id] = None
