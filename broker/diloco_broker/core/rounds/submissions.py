"""Submissions: pushes that are kept until they are complete, and count completely or not at all.

All modes that need complete pushes (asynchronous, quorum, deterministic, robust) share these records.
A submission is in the *pool* of its fragment from its grant until it has been merged. A round uses the
pool of its fragment, so a push that is too late for one round is available to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from diloco_broker.core.effects import Inspect, WholePush
from diloco_broker.core.rounds.round import Phase, PushInProgress, PushKey, RemoteChunk, Update

# Pushes that are remembered as chosen though a relay lost a part of them.
MOST_IN_TIME = 1024


@dataclass(eq=False)
class Submission(PushInProgress):
    """A push that is being received; `before` are chunks that an earlier version contains."""

    begun_at: float  # when its push was accepted (run time)
    progress_at: float  # when the last chunk arrived (run time)
    payloads: list[Any] = field(init=False)  # the chunks taken, None where one is missing
    committed: bool = False
    whole_at: float | None = None  # when it became complete (run time); None before
    is_chosen: bool = False  # it is part of the closing update
    number: int | None = None  # of its round, once it is chosen; None in asynchronous mode

    def __post_init__(self) -> None:
        super().__post_init__()
        self.payloads = [None] * self.push.chunks

    @property
    def is_whole(self) -> bool:
        return self.whole_at is not None

    @property
    def is_sent(self) -> bool:
        """Every chunk has arrived; some may not have been inspected."""
        return self.committed and self.held.is_full

    def work(self, index: int, payload: Any) -> Inspect:
        return Inspect(
            self.push.fragment, index, *self.key, wire_dtype=self.push.wire_dtype, payload=payload
        )

    def take(self, index: int, payload: Any, squares: float, fingerprint: int, now: float) -> None:
        self.looked_at(index, squares, fingerprint)
        self.payloads[index] = payload
        self._settle(now)

    def hold(self, chunk: RemoteChunk, now: float) -> None:
        super().hold(chunk, now)
        self.take(chunk.index, chunk, chunk.squares, chunk.fingerprint, now)

    def lose(self, chunk: RemoteChunk) -> None:
        """A relay has lost a chunk that it held."""
        self.arrived.discard(chunk.index)
        self.taken.discard(chunk.index)
        self.payloads[chunk.index] = None
        self.squares = max(0.0, self.squares - chunk.squares)
        self.fingerprint = (self.fingerprint - chunk.fingerprint) % 2**64
        self.whole_at = None

    def commit(self, now: float) -> None:
        self.committed = True
        self._settle(now)

    def _settle(self, now: float) -> None:
        self.progress_at = now
        if self.committed and (self.before | self.taken).is_full:
            self.whole_at = now

    def merged(self, scale: float) -> WholePush:
        """The push as it is merged, with its values multiplied by `scale`."""
        return WholePush(
            worker_id=self.worker_id,
            push_id=self.push.push_id,
            weight=self.weight,
            scale=scale,
            norm=self.norm,
            wire_dtype=self.push.wire_dtype,
            payloads=self.payloads,
        )


Pool = dict[PushKey, Submission]


@dataclass
class Submissions:
    """All submissions that have not been merged, and the queue for admission slots."""

    pools: dict[int, Pool] = field(default_factory=dict)  # by fragment
    # (worker id, fragment) in the order of their requests.
    queue: deque[tuple[str, int]] = field(default_factory=deque)
    # Pushes that an update had chosen when a relay lost a part of them: they are in time for the next.
    in_time: deque[PushKey] = field(default_factory=lambda: deque(maxlen=MOST_IN_TIME))

    def pool(self, fragment: int) -> Pool:
        return self.pools.setdefault(fragment, {})

    def __iter__(self) -> Iterator[Submission]:
        return (s for pool in self.pools.values() for s in list(pool.values()))

    def find(self, fragment: int, worker_id: str, push_id: int | None) -> Submission | None:
        if push_id is None:
            return None
        return self.pools.get(fragment, {}).get((worker_id, push_id))

    def drop(self, submission: Submission) -> None:
        """Remove a submission from its pool."""
        self.pool(submission.push.fragment).pop(submission.key, None)

    def whole(self) -> list[Submission]:
        """Complete submissions of all fragments, in the order in which they became complete."""
        return sorted((s for s in self if s.is_whole), key=lambda s: s.whole_at or 0.0)

    def check_invariants(self) -> None:
        for pool in self.pools.values():
            for key, s in pool.items():
                assert key == s.key
                s.check_invariants()
                assert s.is_whole == (s.committed and (s.before | s.taken).is_full)
                assert all((p is not None) == (i in s.taken) for i, p in enumerate(s.payloads))


@dataclass
class StagedUpdate(Update):
    """An update made of complete submissions: those `chosen`, once it is closing."""

    chosen: tuple[Submission, ...] = field(default=(), init=False)

    @property
    def pushes(self) -> tuple[Submission, ...]:
        return self.chosen

    def check_invariants(self) -> None:
        assert bool(self.chosen) == (self.phase is Phase.CLOSING)
        assert all(s.push.fragment == self.fragment for s in self.chosen)
