"""Whose turn it is to compute: the workers of a run share one process, and one core of it.

Threads that compute at the same time would spend their time handing Python's lock to each other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import count

# Seconds that one worker may wait for another: a busy machine, or one that sleeps; then something hangs.
PATIENCE_S = 3600.0


class Stuck(Exception):
    """A worker has waited for too long for the others."""


class Broken(Exception):
    """Another worker has failed; nothing is to be waited for."""


def virtual_order(speeds: Sequence[float], steps: Sequence[int]) -> Iterator[tuple[float, int]]:
    """Seconds, and who has made its H steps then; without end. Of two at once the lower number is first.

    >>> order = virtual_order([1.0, 2.0], [10, 10])
    >>> [next(order) for _ in range(4)]
    [(5.0, 1), (10.0, 0), (10.0, 1), (15.0, 1)]
    """

    def ends(worker: int) -> Iterator[tuple[float, int]]:
        return ((number * steps[worker] / speeds[worker], worker) for number in count(1))

    return merge(*(ends(worker) for worker in range(len(speeds))))


class Baton:
    """Goes from worker to worker in the order of virtual time, for H steps and their exchange.

    Args:
        speeds, steps: of each worker: steps a second, and H.
        total: steps of all workers after which the run has ended.
    """

    def __init__(self, speeds: Sequence[float], steps: Sequence[int], total: int) -> None:
        self._order = virtual_order(speeds, steps)
        self._steps, self._total = steps, total
        self._changed = threading.Condition()
        self._broken = self._ended = False
        self.now, self._next = next(self._order)
        self.made = 0  # steps of all workers

    @property
    def share(self) -> float:
        """Of the whole run, what has been made."""
        return min(1.0, self.made / self._total)

    def wait_for(self, worker: int) -> bool:
        """Wait for this worker's turn; False where the run has ended."""
        with self._changed:
            is_due = self._changed.wait_for(
                lambda: self._broken or self._ended or self._next == worker, PATIENCE_S
            )
            if self._broken:
                raise Broken
            if not is_due:
                raise Stuck(f"worker {worker} had no turn within {PATIENCE_S:.0f} s")
            return not self._ended

    def pass_on(self) -> None:
        with self._changed:
            self.made += self._steps[self._next]
            if self.made >= self._total:
                self._ended = True  # and the clock stays
            else:
                self.now, self._next = next(self._order)
            self._changed.notify_all()

    def end(self, *, broken: bool = False) -> None:
        """Nobody has a turn any more."""
        with self._changed:
            self._ended = True
            self._broken = self._broken or broken
            self._changed.notify_all()
