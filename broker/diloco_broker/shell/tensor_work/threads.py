"""Threads that execute tensor work in parallel with the loop's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

from diloco_protocol.tensors.threads import thread_count, thread_pool

# Pieces of work per thread in one turn: faster threads take more of them, and the turn stays short.
PIECES_EACH = 2


class TensorThreads:
    """A pool of `thread_count(asked)` threads, one of which is the caller's."""

    def __init__(self, asked: int) -> None:
        count = thread_count(asked)
        self._others = count - 1
        # Pieces of work to pass to one `run`.
        self.at_a_time = PIECES_EACH * count if self._others else 1
        self._pool = thread_pool(self._others)

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call all functions in parallel, and return their results in order.

        An exception of a function is raised here, after all threads have finished.
        """
        if self._pool is None or len(calls) == 1:
            return [call() for call in calls]
        found: list[Any] = [None] * len(calls)
        left = deque(enumerate(calls))

        def work() -> None:
            while True:
                try:
                    number, call = left.popleft()  # atomic
                except IndexError:
                    return
                found[number] = call()

        lent = [self._pool.submit(work) for _ in range(min(self._others, len(calls) - 1))]
        try:
            work()
        finally:
            wait(lent)
        for each in lent:
            each.result()
        return found

    def close(self) -> None:
        """Stop the threads, which are idle."""
        if self._pool is not None:
            self._pool.shutdown()
