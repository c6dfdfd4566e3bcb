"""One program of a local run, restarted after failures by the rules of `diloco-worker run`."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from diloco_tools.processes import Child, Children, ended
from diloco_worker.launching import END_FILE, Restarts, code_of, forget, meant, word


class Program:
    """Started at once.

    Attributes:
        code: exit code of its last process as a shell reports it; None while it may be restarted.
        has_joined: whether its worker reported on leaving that it was in the run.

    Args:
        end_file: where its worker writes why it left.
        restarts: limit of consecutive restarts.
    """

    def __init__(
        self,
        children: Children,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        end_file: Path,
        restarts: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.code: int | None = None
        self._children = children
        self._command = command
        self._env = {**env, END_FILE: str(end_file)}
        self._end_file = end_file
        self._restarts = Restarts(restarts)
        self._clock = clock
        self._again_at = 0.0
        self.child = self._start(is_restart=False)

    def _start(self, *, is_restart: bool) -> Child:
        forget(self._end_file)
        self._began = self._clock()
        return self._children.add(
            Child(
                self.name,
                self._command,
                self._children.folder,
                env=self._env,
                work_in=Path.cwd(),
                is_restart=is_restart,
            )
        )

    @property
    def is_running(self) -> bool:
        """Whether any of its processes is alive, including one that outlives the command."""
        return self.child.group_is_alive

    @property
    def has_joined(self) -> bool:
        return bool(word(self._end_file))

    def look(self) -> str | None:
        """Notice its end, or restart it when that is due; returns a log line if something happened."""
        if self.code is not None or self.child.running:
            return None
        if self._again_at:
            if self._clock() >= self._again_at:
                self._again_at = 0.0
                self.child.kill()  # processes that a shell left behind would train beside the next
                self.child = self._start(is_restart=True)
            return None
        code = self._exit_code()
        pause = self._restarts.pause(code, self._clock() - self._began)
        if pause is None:
            self.code = code
            return None
        self._again_at = self._clock() + pause
        number, most = self._restarts.in_a_row, self._restarts.most
        how = ended(self.child.process.returncode)
        return f"{self.name} {how}; restart {number} of {most} in {pause:g} s"

    def start_no_more(self) -> None:
        """Never restart it."""
        if self.code is None and not self.child.running:
            self.code = self._exit_code()
        self._restarts.most = 0

    def ask_to_end(self) -> None:
        """Send SIGTERM to its processes and never restart it."""
        self.start_no_more()
        self.child.signal_group(signal.SIGTERM)

    def _exit_code(self) -> int:
        return meant(code_of(self.child.process.returncode), word(self._end_file))
