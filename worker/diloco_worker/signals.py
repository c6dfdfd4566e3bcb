"""SIGTERM while a worker is in a run: the script ends in order, and the broker is told.

A script that looks at `should_stop` is told there, and ends its loop by itself. In one that never has,
the signal raises SystemExit in the main thread, as Ctrl-C raises KeyboardInterrupt, so that the `with`
is left. A second signal does what the first would have done without us: it ends the process at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

# What a shell says of a process that SIGTERM has ended: 128 + 15.
EXIT_CODE = 128 + signal.SIGTERM


class Termination:
    """Takes SIGTERM between `install` and `restore`, if nobody else does.

    Args:
        is_watched: whether the script looks at `should_stop`.
        wake: ends a wait of the main thread; called in the handler, so it must take no lock.

    Attributes:
        is_asked: SIGTERM has come.
    """

    def __init__(self, is_watched: Callable[[], bool], wake: Callable[[], None]) -> None:
        self.is_asked = False
        self._holds = 0
        self._is_watched = is_watched
        self._wake = wake
        self._pid: int | None = None  # of the process whose signal is taken

    def install(self) -> None:
        """Take SIGTERM from here on: in the main thread, where it does what it does by default."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._pid = os.getpid()
            signal.signal(signal.SIGTERM, self._handle)

    def restore(self) -> None:
        """Take it no more; a handler that somebody else has installed meanwhile stays."""
        if self._pid is not None and signal.getsignal(signal.SIGTERM) == self._handle:
            # Another thread than the main one cannot: then the handler does what is the default.
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._pid = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A forked child, such as one of a data loader, has inherited this handler.
        if self.is_asked or os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.is_asked = True
        self._wake()
        if not self._holds:
            self._end()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """In here SIGTERM only asks; the script ends behind it. Half a merge must not be left."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
        if self.is_asked and not self._holds:
            self._end()

    def _end(self) -> None:
        if self._pid is not None and not self._is_watched():
            raise SystemExit(EXIT_CODE)
