"""Workers that the run lacks: those that died, left, or will rejoin. For displays only.

A death stays on record until the worker rejoins, another worker replaces it, or an operator kicks it.
Otherwise a run that lost half of its workers in the night would look healthy in the morning.

A joining worker removes its own record, or else that of another worker, so that records and members
together never exceed `--max-workers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from diloco_broker.core.members.members import Member

# Deaths on record; all are published each second, and a fleet of spot instances loses many workers.
MOST_DEAD = 100
# Seconds for which a death is shown: an operator sees it the next morning, or after a day off.
KEPT_S = 48 * 3600.0


@dataclass(frozen=True)
class Death:
    """A worker as it was at its death, the time of that (core's clock), and why, as a clause."""

    member: Member
    at: float
    why: str


@dataclass
class Absences:
    """Attributes:
    dead: by worker id, the earliest death first.
    left: ids of workers that left properly or were kicked, and that no other worker has replaced, the
        earliest first. They lower the number of workers that are due.
    returning: ids of workers that are absent and still due: those that were asked to rejoin, that left
        to rejoin, or that were members or missing when the checkpoint was taken.
    """

    dead: dict[str, Death] = field(default_factory=dict)
    left: dict[str, None] = field(default_factory=dict)
    returning: dict[str, None] = field(default_factory=dict)

    def died(self, member: Member, why: str, now: float) -> None:
        """Record that a worker died; it is still due."""
        member.forget_work()
        self.dead.pop(member.worker_id, None)
        self.dead[member.worker_id] = Death(member, now, why)
        while len(self.dead) > MOST_DEAD:
            self._forget(next(iter(self.dead)))

    def left_properly(self, member: Member) -> None:
        """Record that a worker left and is not due any more."""
        self.left[member.worker_id] = None

    def will_return(self, member: Member) -> None:
        """Record that a worker left and will rejoin."""
        self.returning[member.worker_id] = None

    def joined(self, member: Member) -> None:
        """Remove the record of a worker that joined, or else the oldest one of another worker."""
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
        """Record that a dead worker is not due any more. Returns False if it is not recorded as dead."""
        is_dead = self.dead.pop(worker_id, None) is not None
        if is_dead:
            self.left[worker_id] = None
        return is_dead

    def recount(self) -> None:
        """Stop departures so far from lowering `--workers`, which an operator has changed."""
        self.returning |= self.left
        self.left.clear()

    @property
    def missing(self) -> tuple[str, ...]:
        """Ids of workers that are absent and still due."""
        return (*self.dead, *self.returning)

    def restore(self, left: Iterable[str], due: Iterable[str]) -> None:
        """Continue from a checkpoint, by which these workers had left, and those were due."""
        self.left = dict.fromkeys(left)
        self.returning = {worker_id: None for worker_id in due if worker_id not in self.left}

    def due(self, wanted: int, alive: int) -> int:
        """Number of workers that should be alive, given `wanted` (`--workers`) and `alive` ones."""
        return max(wanted - len(self.left), alive + len(self.dead))

    def tick(self, now: float) -> None:
        """Remove old deaths."""
        for worker_id, death in list(self.dead.items()):
            if now - death.at <= KEPT_S:
                break
            self._forget(worker_id)

    def _forget(self, worker_id: str) -> None:
        """Stop showing a death; its worker is still due."""
        del self.dead[worker_id]
        self.returning[worker_id] = None
