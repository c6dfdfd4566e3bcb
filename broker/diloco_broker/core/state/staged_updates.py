"""Updates made of whole submissions: a staged round, and an update of asynchronous mode.

Of a staged round:

- It is OPEN until every expected worker's submission is whole and at least `floor` are; with a quorum K
  also once K are whole and `grace` seconds have passed since. K never exceeds those who could still
  come, nor falls below the floor.
- Then it is CLOSING with the whole submissions it has chosen, at most one of each worker, in the order
  of worker ids. Nothing that happens to a worker changes these any more.
- A worker whose push was refused is *skipped*: not waited for in that round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from diloco_broker.core.rounds.decision import Tally
from diloco_broker.core.state.submissions import Pool, Submission, Submissions
from diloco_broker.core.state.update import Barrier, Phase, Update
from diloco_protocol.bitmap import Bitmap


@dataclass
class StagedUpdate(Update):
    """An update made of whole submissions: those `chosen`, once it is closing."""

    chosen: tuple[Submission, ...] = field(default=(), init=False)

    @property
    def pushes(self) -> tuple[Submission, ...]:
        return self.chosen

    def check_invariants(self) -> None:
        assert bool(self.chosen) == (self.phase is Phase.CLOSING)
        assert all(s.is_whole and s.push.fragment == self.fragment for s in self.chosen)


@dataclass
class AsyncUpdate(StagedUpdate):
    """A submission, or those of one grace window, applied to the fragment of the first."""

    submissions: Submissions = field(default_factory=Submissions)  # all there are

    @property
    def begun(self) -> set[str]:
        return {s.worker_id for s in self.chosen}

    @property
    def participating(self) -> set[str]:
        return {s.worker_id for s in self.submissions}

    def has_all_of(self, worker_id: str) -> bool:
        return any(s.is_whole for s in self.submissions if s.worker_id == worker_id and not s.is_up)

    def apply(self, chosen: tuple[Submission, ...], size: int) -> None:
        self.phase = Phase.CLOSING
        self.chosen, self.fragment, self.size = chosen, chosen[0].push.fragment, size
        self.stepped = Bitmap(size)


@dataclass
class StagedRound(StagedUpdate):
    """A round over whole submissions; see the head of this module."""

    barrier: Barrier
    pool: Pool = field(default_factory=dict)  # the submissions of its fragment
    quorum: int | None = None
    quorum_at: float | None = None  # when `quorum` of them were whole (run time)

    @property
    def begun(self) -> set[str]:
        return self.participating | self.barrier.skipped

    @property
    def participating(self) -> set[str]:
        return set(self._workers_of)

    @property
    def participants(self) -> int:
        return sum(self._workers_of.values())

    @property
    def _workers_of(self) -> dict[str, int]:
        members = self.chosen if self.phase is Phase.CLOSING else self._here
        return {s.worker_id: s.push.workers for s in members}

    @property
    def _here(self) -> list[Submission]:
        """Those that are still to be merged: what has gone up is in an earlier round."""
        return [s for s in self.pool.values() if not s.is_up]

    def has_all_of(self, worker_id: str) -> bool:
        return any(s.is_whole for s in self._here if s.worker_id == worker_id)

    @property
    def has_work_to_look_at(self) -> bool:
        return any(s.is_sent and not s.is_whole for s in self._here)

    def whole(self) -> list[Submission]:
        """The first whole submission of each worker, in the order of worker ids."""
        first: dict[str, Submission] = {}
        for submission in self._here:
            other = first.get(submission.worker_id)
            if submission.whole_at is not None and (
                other is None or submission.whole_at < (other.whole_at or 0.0)
            ):
                first[submission.worker_id] = submission
        return [first[worker_id] for worker_id in sorted(first)]

    def look(self, now: float, *, floor: int, quorum: int | None) -> None:
        """Note when as many are whole as a quorum asks for."""
        if quorum != self.quorum:
            self.quorum, self.quorum_at = quorum, None
        if self.quorum_at is None and self._has_quorum(floor):
            self.quorum_at = now

    def tally(self, floor: int) -> Tally:
        here = self._whole_of
        missing = self.barrier.expected - here - self.barrier.skipped
        may_come = len(self.barrier.expected | self.participating)
        enough_at = self.quorum_at if self._has_quorum(floor) else None
        return Tally(here, missing, not missing, may_come, enough_at)

    @property
    def _whole_of(self) -> set[str]:
        return {s.worker_id for s in self._here if s.is_whole}

    def _has_quorum(self, floor: int) -> bool:
        here = self._whole_of
        if self.quorum is None or not here:
            return False
        # Those that can still come, and those whose work is here although they have left.
        reach = len(self.barrier.expected | here)
        return len(here) >= max(floor, min(self.quorum, reach))

    def close(self, chosen: Iterable[Submission]) -> None:
        """Begin to close, with these."""
        self.phase = Phase.CLOSING
        self.chosen = tuple(chosen)
        for each in self.chosen:
            each.number = self.number

    def check_invariants(self) -> None:
        super().check_invariants()
        workers = [s.worker_id for s in self.chosen]
        assert len(workers) == len(set(workers)), "two submissions of a worker are merged"
