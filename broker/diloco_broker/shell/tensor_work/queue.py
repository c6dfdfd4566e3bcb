"""In which order tensor work is done."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from diloco_broker.core.effects import DropInitial, Fold, Step, StoreInitial, TensorWork

# Folds taken before one that came earlier; then it is its turn, whatever its chunk.
PASSED_BY = 64


class WorkQueue:
    """Steps first, then folds in the order of chunks, then the rest as it came.

    Contributions to the same chunk are so added up one after the other, however far one worker is ahead
    of another, and stepped while the last of them are still held as they came (see `StreamingMean`).
    What waits meanwhile is not acknowledged, so it costs no worker more than a window. It does not wait
    for long either: its sender would take the connection for dead.
    """

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        # As they came, each with how many folds had been taken by then.
        self._folds: dict[int, tuple[Fold, int]] = {}
        self._heap: list[tuple[int, int]] = []  # chunk, key in `_folds`; those taken may be in it
        self._others: deque[TensorWork] = deque()
        self._added = self._taken = 0  # folds

    def __bool__(self) -> bool:
        return bool(self._steps or self._folds or self._others)

    def __iter__(self) -> Iterator[TensorWork]:
        """All of it; the first is what `take` returns next."""
        yield from self._steps
        if self._folds:
            first = self._next_fold()
            yield self._folds[first][0]
            yield from (fold for key, (fold, _) in self._folds.items() if key != first)
        yield from self._others

    def peek(self) -> TensorWork:
        """What `take` returns next; raises IndexError when there is nothing."""
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
        """What is to be done next; raises IndexError when there is nothing."""
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
