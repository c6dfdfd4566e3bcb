"""A thread that works for the loop, which a slow disk must not delay."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Work = TypeVar("Work")
Found = TypeVar("Found")


class Background(Generic[Work, Found]):
    """Does pieces of work in order, in a daemon thread that starts with the first one.

    Args:
        name: of the thread.
        do: does one piece of work, and raises nothing. Its result, unless that is None, is in `results`.
        wake: called after each piece.
        most: pieces that may wait; a new one replaces the oldest. None: no limit.
    """

    def __init__(
        self,
        name: str,
        do: Callable[[Work], Found | None],
        wake: Callable[[], object] = lambda: None,
        most: int | None = None,
    ) -> None:
        self.results: deque[Found] = deque()
        self._name, self._do, self._wake = name, do, wake
        self._waiting: deque[Work] = deque(maxlen=most)
        self._changed = threading.Condition()
        self._is_busy = self._is_closed = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """The number of pieces that wait or are being done."""
        return len(self._waiting) + self._is_busy

    def add(self, work: Work) -> None:
        """Do this after the others. Returns at once."""
        with self._changed:
            self._waiting.append(work)
            self._changed.notify_all()
        if self._thread is None:
            thread = threading.Thread(target=self._main, name=self._name, daemon=True)
            thread.start()
            self._thread = thread  # only after a successful start, so that the next call retries

    def finish(self, timeout: float | None = None) -> bool:
        """Wait until everything is done, at most `timeout` seconds; returns whether it is."""
        with self._changed:
            if self._thread is None:  # it may have failed to start
                return not self._waiting
            return self._changed.wait_for(lambda: not len(self), timeout)

    def close(self, *, forget: bool = False) -> None:
        """Stop the thread after the pieces that wait, or with `forget` after the one in progress."""
        with self._changed:
            if forget:
                self._waiting.clear()
            self._is_closed = True
            self._changed.notify_all()

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                work = self._waiting.popleft()
                self._is_busy = True
            found = None
            try:
                found = self._do(work)
            finally:
                del work  # it may hold much memory
                with self._changed:
                    if found is not None:
                        self.results.append(found)
                    self._is_busy = False
                    self._changed.notify_all()
            self._wake()
