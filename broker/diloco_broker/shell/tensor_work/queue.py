"""A queue that orders tensor work."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from diloco_broker.core.effects import DropInitial, Fold, Step, StoreInitial, TensorWork

# Number of folds that may overtake an older one.
PASSED_BY = 64


class WorkQueue:
    """Returns steps first, then folds by chunk index, then other work in order of arrival.

    So contributions to the same chunk are added one after the other, even if one worker is far ahead of
    another, and stepped while the last of them are still held undecoded (see `StreamingMean`). Waiting
    chunks are not acknowledged, so they cost a worker at most one upload window. A fold does not wait
    long (`PASSED_BY`): its sender would take the connection for dead.
    """

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        # In order of arrival, each with the number of folds taken before it arrived.
        self._folds: dict[int, tuple[Fold, int]] = {}
        self._heap: list[tuple[int, int]] = []  # chunk, key in `_folds`; those taken may be in it
        self._others: deque[TensorWork] = deque()
        self._added = self._taken = 0  # folds

    def __bool__(self) -> bool:
        return bool(self._steps or self._folds or self._others)

    def __iter__(self) -> Iterator[TensorWork]:
        """Iterate over all work; the first is what `take` returns next."""
        yield from self._steps
        if self._folds:
            first = self._next_fold()
            yield self._folds[first][0]
            yield from (fold for key, (fold, _) in self._folds.items() if key != first)
        yield from self._others

    def peek(self) -> TensorWork:
        """The work that `take` returns next; raises IndexError if the queue is empty."""
        if self._steps:
            return self._steps[0]
        return self._folds[self._next_fold()][0] if self._folds else self._others[0]

    def add(self, work: TensorWork | DropInitial) -> None:
        match work:
            case DropInitial():
                self._others = deque(w for w in self._others if not isinstance(w, StoreInitial))
            case Step():
                self._steps.append(work)
            case Fold(index=index):
                key = self._added = self._added + 1
                self._folds[key] = work, self._taken
                heapq.heappush(self._heap, (index, key))
            case _:
                self._others.append(work)

    def take(self) -> TensorWork:
        """Remove and return the next work; raises IndexError if the queue is empty."""
        if self._steps:
            return self._steps.popleft()
        if not self._folds:
            return self._others.popleft()
        fold, _ = self._folds.pop(self._next_fold())
        self._taken += 1
        if not self._folds:
            self._heap.clear()
        return fold

    def _next_fold(self) -> int:
        oldest, (_, taken) = next(iter(self._folds.items()))
        if self._taken - taken >= PASSED_BY:
            return oldest
        while self._heap[0][1] not in self._folds:
            heapq.heappop(self._heap)
        return self._heap[0][1]
