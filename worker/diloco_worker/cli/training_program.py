"""A training program as a child process: started, sent the signals meant for it, restarted.

The child has its own session, so that Ctrl-C in a terminal reaches it once, from here, and not from the
terminal as well: a second one would end it at once.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from diloco_worker.launching import END_FILE, FINAL, Restarts, code_of, forget, meant, word

logger = logging.getLogger("diloco.worker")

# These ask a program to end; the other two mean what the program defines.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FORWARDED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)


class TrainingProgram:
    """Runs one program, and restarts it where it fails. `run` belongs to the main thread.

    Args:
        end_file: where its workers write why they left.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], restarts: Restarts, end_file: Path
    ) -> None:
        self._command = list(command)
        self._environ = {**environ, END_FILE: str(end_file)}
        self._end_file = end_file
        self._restarts = restarts
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []  # signals that came while no child was running
        self._asked: int | None = None  # the first signal that asked to end
        self._reader, self._writer = os.pipe()

    def run(self) -> int:
        """The exit code of the program, of its last incarnation if there were several."""
        with self._signals():
            while True:
                began = time.monotonic()
                forget(self._end_file)
                ended = self._once()
                code = meant(ended, word(self._end_file))
                if code != ended:
                    logger.info("The program ended with code %d, which means %d.", ended, code)
                pause = self._restarts.pause(code, time.monotonic() - began)
                if self._asked_to_end() is not None:
                    return code
                if pause is None:
                    self._tell_end(code)
                    return code
                logger.warning(
                    "The program ended with code %d; restart %d of %d in %g s.",
                    code,
                    self._restarts.in_a_row,
                    self._restarts.most,
                    pause,
                )
                select.select([self._reader], [], [], pause)
                if (asked := self._asked_to_end()) is not None:
                    return 128 + asked

    def _asked_to_end(self) -> int | None:
        return self._asked  # a signal changes it between any two lines

    def _tell_end(self, code: int) -> None:
        why = FINAL.get(code)
        if why is None:
            logger.error("The program ended with code %d; not restarting it.", code)
        elif code:
            logger.warning("The program ended with code %d: %s.", code, why)

    def _once(self) -> int:
        try:
            self._child = subprocess.Popen(self._command, env=self._environ, start_new_session=True)
        except OSError as error:
            logger.error("%s cannot be started: %s.", self._command[0], error.strerror)
            return 127 if isinstance(error, FileNotFoundError) else 126
        while self._early:
            self._give(self._early.pop(0))
        returned = self._child.wait()
        self._child = None
        return code_of(returned)

    def _give(self, number: int) -> None:
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.send_signal(number)
        elif number in ENDING:
            self._early.append(number)

    def _take(self, number: int, frame: FrameType | None) -> None:
        """The signal handler; it takes no lock."""
        if number in ENDING and self._asked is None:
            self._asked = number
            os.write(self._writer, b"\0")
        self._give(number)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        # Signals ignored here, by nohup for instance, are to be ignored there as well.
        meant = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
        former = {number: signal.signal(number, self._take) for number in meant}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
            os.close(self._reader)
            os.close(self._writer)
