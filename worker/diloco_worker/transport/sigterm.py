"""SIGTERM and Ctrl-C while a worker is in a run: the script ends in order, and the broker is told.

After SIGTERM `should_stop` is True, and a script that looks at it ends its loop by itself. One that
makes another step although it could have looked is ended: the step raises SystemExit, as Ctrl-C raises
KeyboardInterrupt, so that the `with` is left. While the worker joins or leaves, and with `at_once`,
SIGTERM raises it in the main thread wherever that is. A second SIGTERM does what the first would have
done without us: it ends the process at once. Not so an echo of the first: systemd sends SIGTERM to each
process of a service, and `diloco-worker run` gives its own on.

Neither signal breaks off what the worker is doing between two steps: it comes behind it, or at once
while the worker only waits. So a loop that goes on after Ctrl-C, as in a notebook, goes on with a whole
model.
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

# What a shell says of a process that SIGTERM has ended: 128 + 15.
EXIT_CODE = 128 + signal.SIGTERM
# Seconds within which a second SIGTERM is the first one, sent to the process twice.
ECHO_S = 1.0


class Termination:
    """Handles SIGTERM between `install` and `restore`, unless the script has a handler of its own.

    Args:
        wake: ends a wait of the main thread. It is called in the handler, so it must take no lock.
        at_once: end the script in mid-step, too.
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
        self.is_training = False  # the script steps, and can look at `should_stop` after each
        self._could_look = False  # a step has ended with `should_stop`
        self._is_told = False
        self._holds = 0
        self._waits = 0
        self._holds_interrupts = False
        self._is_interrupted = False
        self._wake = wake
        self._pid: int | None = None  # of the process whose signal is taken

    @property
    def reason(self) -> str | None:
        """Why the process is about to end; None while it is not."""
        return "SIGTERM asks this process to end" if self.is_asked else None

    def tell(self) -> None:
        """Log once that SIGTERM was received. The handler cannot: the log may be locked."""
        if self.is_asked and not self._is_told:
            self._is_told = True
            logger.warning("Received SIGTERM; leaving the run.")

    def step_ended(self) -> None:
        """A step has ended after a process of this worker received SIGTERM, as all of them know.

        Raises SystemExit behind the second of such steps.
        """
        self.tell()
        if self._could_look and self._pid is not None:
            raise SystemExit(EXIT_CODE)
        self._could_look = True

    def install(self) -> None:
        """Handle SIGTERM from here on: in the main thread, where its handler is the default one."""
        is_main = threading.current_thread() is threading.main_thread()
        self._holds_interrupts = is_main
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._pid = os.getpid()
            signal.signal(signal.SIGTERM, self._handle)

    def restore(self) -> None:
        """Handle it no longer; a handler that the script has installed meanwhile stays."""
        if self._pid is not None and signal.getsignal(signal.SIGTERM) == self._handle:
            # Another thread than the main one cannot: then the handler does what is the default.
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._pid = None
        self._holds_interrupts = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A forked child, such as one of a data loader, has inherited this handler.
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
        """In here SIGTERM and Ctrl-C only ask; the script ends behind it. A second Ctrl-C ends it here.

        Ctrl-C is taken in here only, and where it raises KeyboardInterrupt: notebooks set that anew for
        each cell.
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
        """In here, inside `held`, Ctrl-C ends the waiting at once: nothing is being changed."""
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
