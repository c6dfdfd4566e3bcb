"""Child processes of launcher, demo, benchmark and drill: started, watched, ended whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

LINES_SHOWN = 12  # of the log of a child that died
PATIENCE = 10.0  # seconds that a child has to end after SIGTERM before it is killed
POLL_S = 0.02  # between two looks at a process group, which cannot be waited for


class ChildFailed(Exception):
    """A child died or misbehaved; the message names it, says how, and shows its last lines."""


class Child:
    """One process and those that it starts, begun at once; their output goes to NAME.log in `folder`.

    The process leads a session and so a process group of its own. Signals go to the whole group: a shell
    script or a data loader would otherwise leave processes behind. The ranks of torchrun lead sessions
    of their own: torchrun passes SIGTERM on to them, but SIGKILL does not reach them.

    Args:
        env: variables of the process; default: `environment()`.
        work_in: its working folder; default: `folder`.
        is_next_life: append to the log of the life before.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        *,
        stdin: int = subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
        work_in: Path | None = None,
        is_next_life: bool = False,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("ab" if is_next_life else "wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=output,
                stderr=output,
                cwd=work_in or folder,
                env=environment() if env is None else env,
                # Ctrl-C reaches the parent alone, which then ends its children in order.
                start_new_session=True,
            )
        self._group_is_gone = False  # once it is, its id may belong to another group

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the process itself is alive."""
        return self.process.poll() is None

    @property
    def group_is_alive(self) -> bool:
        """Whether the process or any other of its group is alive."""
        if self.running:
            return True
        self._group_is_gone = self._group_is_gone or not _is_alive(self.pid)
        return not self._group_is_gone

    def failure(self, what: str | None = None) -> ChildFailed:
        """The error that tells this child's end; `what` happened, or how the process ended."""
        with self.log.open(encoding="utf-8", errors="replace") as file:
            last = deque((f"    {line.rstrip()}" for line in file if line.strip()), LINES_SHOWN)
        lines = "\n".join(last) or "    (it wrote nothing)"
        what = what or ended(self.process.poll())
        return ChildFailed(f"{self.name} {what}; the last lines of {self.log}:\n{lines}")

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None if it has not ended within `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, seconds))
        return self.process.returncode

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to each process of the group, once. Does nothing if all have ended."""
        if self.group_is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the group; returns when it is gone."""
        self.signal_group(signal.SIGKILL)
        self.process.wait()
        self._wait_for_group(PATIENCE)
        self._group_is_gone = True  # a process that the kernel holds on to is not waited for again

    def end(self) -> None:
        """Send SIGTERM to the group, then SIGKILL to what is left of it after `PATIENCE` seconds."""
        if self.group_is_alive:
            self.signal_group(signal.SIGTERM)
            self._wait_for_group(PATIENCE)
            self.kill()

    def _wait_for_group(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self.wait(seconds)
        while self.group_is_alive and time.monotonic() < deadline:
            time.sleep(POLL_S)


C = TypeVar("C", bound=Child)
G = TypeVar("G", bound="Children")


class Children:
    """A context manager that starts children and, when left, ends the processes still alive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Child] = []

    def start(self, name: str, command: Sequence[str]) -> Child:
        return self.add(Child(name, command, self.folder))

    def add(self, child: C) -> C:
        self.all.append(child)
        return child

    def __enter__(self: G) -> G:
        return self

    def __exit__(self, *error: object) -> None:
        # Workers before the broker, so that they can still leave the run.
        try:
            for child in reversed(self.all):
                child.end()
        finally:  # an impatient second Ctrl-C leaves no process behind either
            for child in self.all:
                child.signal_group(signal.SIGKILL)


class JsonLines:
    """Reads a growing file of JSON lines; each call of `new` returns what has been added since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0

    def new(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]  # the last line may still be in the writing
        self._position += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def _is_alive(group: int) -> bool:
    """Whether a process group has a process that is not a zombie."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):  # macOS: the latter for a group of zombies
        return False
    # Zombies count as members, and stay in a container whose first process reaps none.
    members = list(Path("/proc").glob("[0-9]*/stat"))
    for stat in members:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # PID (NAME) STATE PARENT GROUP ...; the name may have any character
            state, _, of = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(of) == group and state not in ("Z", "X"):
                return True
    return not members  # without /proc killpg decides


def end_like_an_error_on_signals() -> None:
    """On SIGTERM and SIGHUP end as any error would, so that the children are ended, too."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, leave)


def environment() -> dict[str, str]:
    """Ours without any DILOCO_* variable, which would change what the children do.

    But for that of kernels, by which the bits are the same.
    """
    names = [
        name for name in os.environ if not name.startswith("DILOCO_") or name == "DILOCO_KERNELS"
    ]
    ours = {name: os.environ[name] for name in names}
    return ours | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def ended(code: int | None) -> str:
    """How a process ended, in words.

    >>> ended(1), ended(-9)
    ('died with exit code 1', 'was killed by SIGKILL')
    """
    if code is None:
        return "does not answer"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code == 0:
        return "ended before its work was done"
    return f"died with exit code {code}"


def wait_for_line(child: Child, start: str, timeout: float) -> str:
    """The rest of the first line of the child's output that begins with `start` and a space.

    Raises ChildFailed if the child ends first or `timeout` seconds pass.
    """
    deadline = time.monotonic() + timeout
    while True:
        alive = child.running  # asked before reading, so that a last line is not missed
        for line in child.log.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(start + " "):
                return line[len(start) + 1 :].strip()
        if not alive:
            raise child.failure()
        if time.monotonic() > deadline:
            raise child.failure(f"printed no '{start} ...' line in {timeout:.0f} seconds")
        time.sleep(0.05)
