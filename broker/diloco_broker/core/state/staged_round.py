"""One staged round: which whole submissions it is made of, and when it is time.

- It is OPEN until every expected worker's submission is whole and at least `floor` are; with a quorum K
  also once K are whole and `grace` seconds have passed since. K never exceeds those who could still
  come, nor falls below the floor.
- Then it is CLOSING with the whole submissions it has chosen, at most one of each worker, in the order
  of worker ids. Nothing that happens to a worker changes these any more.
- A worker whose push was refused is *skipped*: not waited for in that round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from diloco_broker.core.state.submissions import Pool, Submission, counted
from diloco_broker.core.state.update import Barrier, CountedPush, Phase, Update


@dataclass
class StagedRound(Update):
    """A round over whole submissions; see the head of this module.

    Attributes:
        pool: the submissions of its fragment.
        chosen: those that are merged.
        quorum_at: when so many as `quorum` were whole; None before.
    """

    barrier: Barrier
    pool: Pool = field(default_factory=dict)
    chosen: tuple[Submission, ...] = ()
    quorum: int | None = None
    quorum_at: float | None = None

    @property
    def begun(self) -> set[str]:
        return self.participating | self.barrier.skipped

    @property
    def participating(self) -> set[str]:
        members = self.chosen if self.phase is Phase.CLOSING else self.pool.values()
        return {s.worker_id for s in members}

    @property
    def averaged(self) -> int:
        return len({s.worker_id for s in self.chosen})

    def whole(self) -> list[Submission]:
        """The first whole submission of each worker, in the order of worker ids."""
        first: dict[str, Submission] = {}
        for submission in self.pool.values():
            other = first.get(submission.worker_id)
            if submission.whole_at is not None and (
                other is None or submission.whole_at < (other.whole_at or 0.0)
            ):
                first[submission.worker_id] = submission
        return [first[worker_id] for worker_id in sorted(first)]

    def close_if_due(
        self, now: float, *, floor: int, quorum: int | None, grace: float
    ) -> tuple[Submission, ...]:
        """Begin to close if it is time to; returns what is merged then, nothing before."""
        if quorum != self.quorum:
            self.quorum, self.quorum_at = quorum, None
        whole = self.whole() if self.phase is Phase.OPEN else []
        if not whole or len(whole) < floor or not self._is_time(whole, now, floor, grace):
            return ()
        self.phase = Phase.CLOSING
        self.chosen = tuple(whole)
        return self.chosen

    def _is_time(self, whole: list[Submission], now: float, floor: int, grace: float) -> bool:
        here = {s.worker_id for s in whole}
        if not self.barrier.expected - here - self.barrier.skipped:
            return True
        if self.quorum is None:
            return False
        # Those that can still come, and those whose work is here although they have left.
        reach = len(self.barrier.expected | here)
        if len(whole) < max(floor, min(self.quorum, reach)):
            return False
        if self.quorum_at is None:
            self.quorum_at = now
        return now - self.quorum_at >= grace

    def counted(self) -> Iterator[CountedPush]:
        return counted(self.chosen)

    def check_invariants(self) -> None:
        workers = [s.worker_id for s in self.chosen]
        assert bool(workers) == (self.phase is Phase.CLOSING)
        assert len(workers) == len(set(workers)), "two submissions of a worker are merged"
        assert all(s.is_whole for s in self.chosen)
