"""A few threads that the loop lends pieces of tensor work to, while it does some of them itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

from diloco_protocol.tensors.threads import thread_count, thread_pool

# Pieces for each thread at a time: the quicker one takes more of them, and a turn stays short.
PIECES_EACH = 2


class TensorThreads:
    """`thread_count(asked)` threads, of which one is the caller's own."""

    def __init__(self, asked: int) -> None:
        count = thread_count(asked)
        self._others = count - 1
        # The number of pieces that are worth collecting.
        self.at_a_time = PIECES_EACH * count if self._others else 1
        self._pool = thread_pool(self._others)

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call all of them, and return what they return, in their order.

        Whatever one raises is raised here, once none is at work any more.
        """
        if self._pool is None or len(calls) == 1:
            return [call() for call in calls]
        found: list[Any] = [None] * len(calls)
        left = deque(enumerate(calls))

        def work() -> None:
            while True:
                try:
                    number, call = left.popleft()  # one step for other threads
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
        """End the threads; they have nothing to do."""
        if self._pool is not None:
            self._pool.shutdown()
