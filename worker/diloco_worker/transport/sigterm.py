"""SIGTERM and Ctrl-C while a worker is in a run: the script ends in order, and the broker is told.

After SIGTERM `should_stop` is True, so a script that reads it ends its loop. One that makes another
step although it could have read it gets SystemExit from that step. While the worker joins or leaves,
and with `at_once`, SIGTERM raises SystemExit in the main thread at once. A second SIGTERM ends the
process, but not an echo of the first: systemd sends SIGTERM to each process of a service, and
`diloco-worker run` forwards its own.

Neither signal interrupts a change of the model between two steps: it takes effect after it, or at once
while the worker only waits. So a notebook that goes on after Ctrl-C has a consistent model.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

logger = logging.getLogger("diloco.worker")

# What a shell reports for a process that SIGTERM ended: 128 + 15.
EXIT_CODE = 128 + signal.SIGTERM
# Seconds within which a second SIGTERM is an echo of the first.
ECHO_S = 1.0


class Termination:
    """Handles SIGTERM between `install` and `restore`, unless the script has its own handler.

    Args:
        wake: ends a wait of the main thread. Called in the handler, so it must take no lock.
        at_once: end the script within a step, too.
    """

    def __init__(
        self,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        at_once: bool = False,
    ) -> None:
        self.is_asked = False  # whether SIGTERM was received
        self._asked_at = 0.0
        self._clock = clock
        self._ends_at_once = at_once
        self.is_training = False  # the script steps, and can read `should_stop` after each step
        self._could_look = False  # a step ended with `should_stop`
        self._is_told = False
        self._holds = 0
        self._waits = 0
        self._holds_interrupts = False
        self._is_interrupted = False
        self._wake = wake
        self._pid: int | None = None  # of the process that handles it

    @property
    def reason(self) -> str | None:
        """Why the process is about to end; None while it is not."""
        return "SIGTERM asks this process to end" if self.is_asked else None

    def tell(self) -> None:
        """Log SIGTERM once. The handler cannot: the log may be locked."""
        if self.is_asked and not self._is_told:
            self._is_told = True
            logger.warning("Received SIGTERM; leaving the run.")

    def step_ended(self) -> None:
        """A step ended after a process of this worker received SIGTERM; SystemExit after the second
        one.
        """
        self.tell()
        if self._could_look and self._pid is not None:
            raise SystemExit(EXIT_CODE)
        self._could_look = True

    def install(self) -> None:
        """Handle SIGTERM from now on: in the main thread, where its handler is the default one."""
        is_main = threading.current_thread() is threading.main_thread()
        self._holds_interrupts = is_main
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._pid = os.getpid()
            signal.signal(signal.SIGTERM, self._handle)

    def restore(self) -> None:
        """Stop handling it; a handler that the script installed since stays."""
        if self._pid is not None and signal.getsignal(signal.SIGTERM) == self._handle:
            # Only the main thread can; else the handler does what the default would.
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._pid = None
        self._holds_interrupts = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A forked child, such as a data loader's, inherits this handler.
        is_ours, now = os.getpid() == self._pid, self._clock()
        if is_ours and self.is_asked and now - self._asked_at < ECHO_S:
            return
        if self.is_asked or not is_ours:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._asked_at = now
        self.is_asked = True
        self._wake()
        if not self._holds:
            self._end()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Defer SIGTERM and Ctrl-C to the end of this block; a second Ctrl-C is not deferred. Ctrl-C is
        handled in here only, since notebooks set its handler for each cell.
        """
        takes = (
            self._holds_interrupts
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if takes:
            signal.signal(signal.SIGINT, self._interrupt)
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            if takes and signal.getsignal(signal.SIGINT) == self._interrupt:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            if takes:
                self._raise_interrupt()
        if self.is_asked and not self._holds:
            self._end()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within `held`, let Ctrl-C end a wait at once: nothing is being changed."""
        self._waits += 1
        try:
            self._raise_interrupt()
            yield
        finally:
            self._waits -= 1

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._waits or self._is_interrupted:
            self._is_interrupted = False
            signal.default_int_handler(number, frame)
        self._is_interrupted = True

    def _raise_interrupt(self) -> None:
        if self._is_interrupted:
            self._is_interrupted = False
            raise KeyboardInterrupt

    def _end(self) -> None:
        if self._pid is not None and (self._ends_at_once or not self.is_training):
            raise SystemExit(EXIT_CODE)
