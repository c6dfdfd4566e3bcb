"""Workers that the run lacks: those that died, and how many left properly. For displays only.

A death stays on record until its worker comes back, another worker takes its place, or an operator kicks
it. Otherwise a run that lost half of its workers in the night would look healthy in the morning.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from diloco_broker.core.state.members import Member

# Deaths on record. Each is published once a second, and a fleet of spot instances loses many workers.
MOST_DEAD = 100
# Seconds: whoever looks the next morning, or after a day off, still sees who died.
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
    left: places of workers that left properly, or were kicked, and that no other worker has taken.
    """

    dead: dict[str, Death] = field(default_factory=dict)
    left: int = 0

    def died(self, member: Member, why: str, now: float) -> None:
        """A worker is gone that should be here; of relays the `sites_away` tell."""
        if member.is_relay:
            return
        member.forget_work()
        self.dead.pop(member.worker_id, None)
        self.dead[member.worker_id] = Death(member, now, why)
        while len(self.dead) > MOST_DEAD:
            self._forget(next(iter(self.dead)))

    def left_properly(self, member: Member) -> None:
        """A worker is gone that need not come back."""
        self.left += not member.is_relay

    def joined(self, member: Member) -> None:
        """A worker that was not here joined: it is one of the dead, or takes the place of another."""
        if member.is_relay or self.dead.pop(member.worker_id, None) is not None:
            return
        if self.dead:
            self._forget(next(iter(self.dead)))
        else:
            self.left = max(0, self.left - 1)

    def are_alive(self, worker_ids: Collection[str]) -> None:
        """These are known to live, behind a relay."""
        for worker_id in self.dead.keys() & set(worker_ids):
            self._forget(worker_id)

    def kicked(self, worker_id: str) -> bool:
        """An operator no longer counts on a dead worker. False if it is not one of the dead."""
        is_dead = worker_id in self.dead
        if is_dead:
            self._forget(worker_id)
            self.left += 1
        return is_dead

    def due(self, wanted: int, alive: int, dead_behind: int) -> int:
        """How many workers should be alive, of `wanted` (`--workers`).

        Args:
            alive: how many are, those behind relays included.
            dead_behind: how many relays report as dead.
        """
        return max(wanted - self.left, alive + dead_behind + len(self.dead))

    def tick(self, now: float) -> None:
        """Time has passed: old deaths are forgotten."""
        for worker_id, death in list(self.dead.items()):
            if now - death.at <= KEPT_S:
                break
            self._forget(worker_id)

    def _forget(self, worker_id: str) -> None:
        del self.dead[worker_id]
