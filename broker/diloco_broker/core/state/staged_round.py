"""Whole submissions: kept chunk by chunk until all of one is here, and counted whole or not at all.

Every staged way of reducing (asynchronous, quorum, deterministic, robust) shares these records. A
submission belongs to the *pool* of its fragment from its grant until it has been merged; a round looks
at the pool of its own fragment, so work that comes too late for one round is simply still there for the
next.

The rules of a staged round:

- It is OPEN until every expected worker's submission is whole and at least `floor` are; with a quorum K
  also once K are whole and `grace` seconds have passed since. K never exceeds those who could still
  come, nor falls below the floor.
- Then it is CLOSING with the whole submissions it has chosen, at most one of each worker, in the order
  of worker ids. Nothing that happens to a worker changes these any more.
- A worker whose push was refused is *excused*: not waited for in that round.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from diloco_broker.core import effects
from diloco_broker.core.state.streaming_round import Counting, Key, Phase
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.messages import Push


@dataclass(eq=False)
class Submission:
    """One push on its way to being whole. Two are the same only if they are one object.

    Attributes:
        before: chunks that an earlier version contains; they are not needed again.
        weight: its share in a mean.
        arrived: chunks received, looked at or waiting to be.
        payloads: the chunks that are finite, None where one is missing.
        squares: sum of the squared parameters so far.
        progress_at: when the last chunk came.
        whole_at: when it became whole; None before.
        staleness: versions between its base and the version it is merged into; set when it is.
    """

    worker_id: str
    push: Push
    before: Bitmap
    weight: float
    progress_at: float
    arrived: Bitmap = field(init=False)
    taken: Bitmap = field(init=False)
    payloads: list[Any] = field(init=False)
    squares: float = 0.0
    committed: bool = False
    whole_at: float | None = None
    staleness: int = 0

    def __post_init__(self) -> None:
        self.arrived = Bitmap(self.push.chunks)
        self.taken = Bitmap(self.push.chunks)
        self.payloads = [None] * self.push.chunks

    @property
    def key(self) -> Key:
        return (self.worker_id, self.push.push_id)

    @property
    def held(self) -> Bitmap:
        return self.before | self.arrived

    @property
    def is_whole(self) -> bool:
        return self.whole_at is not None

    def take(self, index: int, payload: Any, squares: float, now: float) -> None:
        """A chunk is here and finite."""
        self.taken.add(index)
        self.payloads[index] = payload
        self.squares += squares
        self._settle(now)

    def commit(self, now: float) -> None:
        """Its worker has sent everything."""
        self.committed = True
        self._settle(now)

    def _settle(self, now: float) -> None:
        self.progress_at = now
        if self.committed and (self.before | self.taken).is_full:
            self.whole_at = now

    def merged(self, scale: float = 1.0) -> effects.WholePush:
        """Itself as it is merged; its values are multiplied by `scale`."""
        return effects.WholePush(
            self.worker_id,
            self.push.push_id,
            self.weight,
            scale,
            math.sqrt(self.squares),
            self.push.wire_dtype,
            self.payloads,
        )


Pool = dict[Key, Submission]


@dataclass
class StagedRound:
    """A round over whole submissions; see the head of this module. `pool` is its fragment's."""

    number: int
    fragment: int
    size: int
    floor: int
    expected: set[str]
    opened_at: float
    pool: Pool = field(default_factory=dict)
    excused: set[str] = field(default_factory=set)
    quorum: int | None = None
    grace: float = 0.0
    quorum_at: float | None = None  # when the quorum was reached
    phase: Phase = Phase.OPEN
    chosen: tuple[Submission, ...] = ()
    stepped: Bitmap = field(init=False)

    def __post_init__(self) -> None:
        self.stepped = Bitmap(self.size)

    # Who.

    @property
    def begun(self) -> set[str]:
        """Workers that have begun a push, or whose push was refused."""
        if self.phase is Phase.CLOSING:
            return {s.worker_id for s in self.chosen} | self.excused
        return {s.worker_id for s in self.pool.values()} | self.excused

    @property
    def participating(self) -> set[str]:
        """Workers whose push is under way or whole."""
        members = self.chosen if self.phase is Phase.CLOSING else self.pool.values()
        return {s.worker_id for s in members}

    @property
    def averaged(self) -> int:
        """Workers of whom a whole push is in the mean."""
        return len({s.worker_id for s in self.chosen})

    @property
    def missing(self) -> set[str]:
        """Expected workers that have not begun."""
        return self.expected - self.begun

    @property
    def below_floor(self) -> bool:
        """True while even all expected workers together would be too few."""
        return self.phase is Phase.OPEN and len(self.expected | self.participating) < self.floor

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

    # What happens.

    def leave(self, worker_id: str) -> None:
        """A worker is gone. Its whole submission, if there is one, counts all the same."""
        self.expected.discard(worker_id)

    def close_if_due(self, now: float) -> bool:
        """Begin to close if it is time to; `chosen` is what is merged then."""
        if self.phase is Phase.CLOSING:
            return False
        whole = self.whole()
        if not whole or len(whole) < self.floor or not self._is_time(whole, now):
            return False
        self.choose(tuple(whole))
        return True

    def _is_time(self, whole: list[Submission], now: float) -> bool:
        here = {s.worker_id for s in whole}
        if not self.expected - here - self.excused:
            return True
        if self.quorum is None:
            return False
        # Those that can still come, and those whose work is here although they have left.
        reach = len(self.expected | here)
        if len(whole) < max(self.floor, min(self.quorum, reach)):
            return False
        if self.quorum_at is None:
            self.quorum_at = now
        return now - self.quorum_at >= self.grace

    def set_fragment(self, fragment: int, size: int) -> None:
        """Without common rounds the fragment is known only when something is applied."""
        self.fragment, self.size = fragment, size
        self.stepped = Bitmap(size)

    def choose(self, chosen: tuple[Submission, ...]) -> None:
        """These are merged; the round is closing."""
        self.phase = Phase.CLOSING
        self.chosen = chosen

    def counting(self) -> Iterator[Counting]:
        """What the version will contain through this round."""
        for s in self.chosen:
            whole = Bitmap.full(self.size)
            yield Counting(s.worker_id, s.push, whole, whole - s.before, s.weight, s.staleness)

    def check_invariants(self) -> None:
        """Raise AssertionError when an invariant is broken; for tests."""
        for key, s in self.pool.items():
            assert key == s.key
            assert not any(i in s.before for i in s.arrived), f"{key} counts a chunk again"
            assert all(i in s.arrived for i in s.taken), f"{key} has what never arrived"
            assert s.is_whole == (s.committed and (s.before | s.taken).is_full)
            assert all((p is not None) == (i in s.taken) for i, p in enumerate(s.payloads))
        workers = [s.worker_id for s in self.chosen]
        assert bool(workers) == (self.phase is Phase.CLOSING)
        assert all(s.is_whole for s in self.chosen)


@dataclass
class Staging:
    """All submissions that have not been merged, and who waits for room.

    Attributes:
        pools: by fragment.
        excused: by fragment: workers whose push for its coming round was refused.
        waiting: (worker id, fragment) in the order in which they asked for a slot.
    """

    pools: dict[int, Pool] = field(default_factory=dict)
    excused: dict[int, set[str]] = field(default_factory=dict)
    waiting: deque[tuple[str, int]] = field(default_factory=deque)

    def pool(self, fragment: int) -> Pool:
        return self.pools.setdefault(fragment, {})

    def excused_from(self, fragment: int) -> set[str]:
        return self.excused.setdefault(fragment, set())

    def __iter__(self) -> Iterator[Submission]:
        return (s for pool in self.pools.values() for s in list(pool.values()))

    def find(self, fragment: int, worker_id: str, push_id: int | None) -> Submission | None:
        if push_id is None:
            return None
        return self.pools.get(fragment, {}).get((worker_id, push_id))

    def drop(self, submission: Submission) -> None:
        """Forget a submission; its memory is free once nothing refers to it."""
        self.pool(submission.push.fragment).pop(submission.key, None)

    def whole(self) -> list[Submission]:
        """Whole submissions of all fragments, those that became whole first in front."""
        return sorted((s for s in self if s.is_whole), key=lambda s: s.whole_at or 0.0)
