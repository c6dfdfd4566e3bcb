"""One streaming round: who is expected, who contributes, which chunks are ready for the outer step.

Each chunk is added to a sum soon after it has come, so the memory needed does not depend on the number
of workers. (`staged_updates` has the rounds over whole submissions.) The rules, all of them:

- A round is OPEN until every expected worker has begun its push and at least `floor` contribute; then
  it is CLOSING, and it ends when every chunk has been stepped.
- A worker that dies or leaves while the round is open leaves the expected set at once. While it is
  closing, a death only means that the chunks it has not delivered are not waited for. So a closing
  round always ends.
- A chunk is *owed* by a contribution until it has been folded. While the round is closing, a chunk that
  nobody owes any more is ready. It is normalised by the weight that actually reached it.
- A chunk that an earlier version contains (`before`) is not owed again: each (worker, push id, chunk)
  counts once.
- A worker whose push was refused before it began is *skipped*: not waited for in that round.
- A worker has one live contribution in a round, and one vote on each chunk. Another push id abandons an
  unfinished contribution; what had arrived of it stays, since it was honest work, and the new push
  brings only the other chunks. (Both in full would count the same steps twice: a worker that was killed
  in the middle of an upload makes them again.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from diloco_broker.core.effects import Fold
from diloco_broker.core.rounds.decision import Tally
from diloco_broker.core.state.update import Barrier, Phase, PushInProgress, PushKey, Update
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.messages import Push


class Ended(str, Enum):
    """Why a contribution will deliver nothing more."""

    GONE = "gone"
    VOIDED = "voided"
    ABANDONED = "abandoned"


@dataclass(eq=False)
class Contribution(PushInProgress):
    """One push in one round; the chunks taken have been added to the round's sums.

    `before` are chunks that an earlier version contains, or an earlier push of its worker in this round.
    """

    ended: Ended | None = None  # why nothing more will come; None while the worker is at it

    @property
    def is_whole(self) -> bool:
        return (self.before | self.taken).is_full

    def work(self, index: int, payload: Any) -> Fold:
        return Fold(
            self.push.fragment,
            index,
            *self.key,
            weight=self.weight,
            wire_dtype=self.push.wire_dtype,
            payload=payload,
        )

    def owes(self, index: int) -> bool:
        if index in self.before or index in self.taken:
            return False
        return self.ended is None or index in self.arrived


@dataclass
class StreamingRound(Update):
    """State of a streaming round."""

    barrier: Barrier
    contributions: dict[PushKey, Contribution] = field(default_factory=dict)
    reached: list[float] = field(init=False)  # weight in the sum of each chunk
    # Contributions that owe each chunk; only while it is closing.
    owed: list[int] = field(default_factory=list, init=False)
    stepping: Bitmap = field(init=False)  # chunks given out for the outer step

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reached = [0.0] * self.size
        self.stepping = Bitmap(self.size)

    # Who.

    @property
    def begun(self) -> set[str]:
        """Workers that have begun a push, whatever became of it, unless they are simply gone."""
        served = (None, Ended.VOIDED)
        return {c.worker_id for c in self.pushes if c.ended in served or c.is_whole}

    @property
    def participating(self) -> set[str]:
        return {c.worker_id for c in self.contributions.values() if c.ended is None or c.is_whole}

    def has_all_of(self, worker_id: str) -> bool:
        return any(c.held.is_full for c in self.of_worker(worker_id) if c.ended is not Ended.VOIDED)

    @property
    def pushes(self) -> Collection[Contribution]:
        return self.contributions.values()

    def of_worker(self, worker_id: str) -> Iterator[Contribution]:
        return (c for c in self.contributions.values() if c.worker_id == worker_id)

    # What happens.

    def begin(
        self, worker_id: str, push: Push, before: Bitmap, weight: float, staleness: int
    ) -> Contribution:
        """Enter a push. The caller has ended or ruled out others of the same worker."""
        for other in self.of_worker(worker_id):
            before = before | other.arrived  # one vote on each chunk
        contribution = Contribution(worker_id, push, before, weight, staleness=staleness)
        self.contributions[contribution.key] = contribution
        if self.phase is Phase.CLOSING:
            raise AssertionError(f"{worker_id} begins a push in closing round {self.number}")
        return contribution

    def folded(self, key: PushKey, index: int, squares: float, fingerprint: int = 0) -> list[int]:
        """A chunk has been added. Returns the chunks that are ready through it."""
        contribution = self.contributions[key]
        contribution.looked_at(index, squares, fingerprint)
        self.reached[index] += contribution.weight
        return self._settle([index])

    def refused(self, key: PushKey, index: int) -> list[int]:
        """A chunk that arrived was not folded: void the push. Returns the chunks that are ready."""
        contribution = self.contributions[key]
        contribution.arrived.discard(index)
        ready = self._settle([index]) + self._end(contribution, Ended.VOIDED, settled=index)
        if contribution.ended is Ended.GONE:
            contribution.ended = Ended.VOIDED  # nobody waits for the rest of it
        return ready

    def _end(self, contribution: Contribution, why: Ended, settled: int | None = None) -> list[int]:
        """Nothing more will come of a contribution. Returns the chunks that are ready through it."""
        if contribution.ended is not None:
            return []
        let_go = [i for i in contribution.held.missing() if i != settled]
        contribution.ended = why
        return self._settle(let_go)

    def abandon(self, contribution: Contribution) -> list[int]:
        """Its worker has begun another push. Returns the chunks that are ready through it."""
        ready = self._end(contribution, Ended.ABANDONED)
        if contribution.ended is Ended.GONE:
            contribution.ended = Ended.ABANDONED  # it will not be taken up again either
        return ready

    def leave(self, worker_id: str) -> list[int]:
        """A worker is gone. Returns the chunks that are ready through it."""
        self.barrier.expect_no_more(worker_id)
        ready: list[int] = []
        for contribution in list(self.of_worker(worker_id)):
            ready += self._end(contribution, Ended.GONE)
        return ready

    def tally(self) -> Tally:
        here, missing = self.participating, self.missing
        return Tally(here, missing, not missing, len(self.barrier.expected | here))

    def close(self) -> list[int]:
        """Begin to close. Returns the chunks that are ready at once."""
        self.phase = Phase.CLOSING
        live = self.contributions.values()
        self.owed = [sum(c.owes(index) for c in live) for index in range(self.size)]
        return self._give_out(index for index in range(self.size) if not self.owed[index])

    def _settle(self, indexes: Iterable[int]) -> list[int]:
        """Chunks that one contribution owes no longer."""
        if self.phase is Phase.OPEN:
            return []
        ready = []
        for index in indexes:
            self.owed[index] -= 1
            if not self.owed[index]:
                ready.append(index)
        return self._give_out(ready)

    def _give_out(self, indexes: Iterable[int]) -> list[int]:
        given = list(indexes)
        for index in given:
            self.stepping.add(index)
        return given

    def check_invariants(self) -> None:
        for key, c in self.contributions.items():
            assert key == c.key
            c.check_invariants()
        for index in range(self.size):
            weight = sum(c.weight for c in self.contributions.values() if index in c.taken)
            assert abs(weight - self.reached[index]) <= 1e-9 * max(1.0, weight)
            if self.phase is Phase.CLOSING:
                owed = sum(c.owes(index) for c in self.contributions.values())
                assert owed == self.owed[index], f"chunk {index}: {owed} owed, {self.owed[index]}"
                assert (owed == 0) == (index in self.stepping), f"chunk {index} is not given out"
        assert all(i in self.stepping for i in self.stepped)
        live = [c.worker_id for c in self.contributions.values() if c.ended is None]
        assert len(live) == len(set(live)), "a worker has two live contributions"
