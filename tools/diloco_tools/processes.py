"""Child processes of launcher, demo, benchmark and drill; all are ended when their context is left."""

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
PATIENCE = 10.0  # seconds between SIGTERM and SIGKILL
POLL_S = 0.02  # between two polls of a process group, which cannot be waited for


class ChildFailed(Exception):
    """A child died or misbehaved; the message names it, the reason, and its last lines of output."""


class Child:
    """A process, started at once, and its descendants; their output goes to NAME.log in `folder`.

    The process leads a session, and so a process group. Signals go to the whole group, because a shell
    script or a data loader could leave processes behind. The ranks of torchrun lead their own sessions:
    torchrun passes SIGTERM on to them, but SIGKILL does not reach them.

    Args:
        env: environment; default: `environment()`.
        work_in: working folder; default: `folder`.
        is_restart: append to the log of the previous process of this name.
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
        is_restart: bool = False,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("ab" if is_restart else "wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=output,
                stderr=output,
                cwd=work_in or folder,
                env=environment() if env is None else env,
                # Ctrl-C reaches only the parent, which then ends its children in order.
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
        """The error for this child's end; `what` describes it, by default how the process ended."""
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
        self._group_is_gone = True  # do not wait again for a process stuck in the kernel

    def end(self) -> None:
        """Send SIGTERM to the group, and SIGKILL after `PATIENCE` seconds."""
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
        finally:  # also after a second Ctrl-C
            for child in self.all:
                child.signal_group(signal.SIGKILL)


class JsonLines:
    """Reads a growing file of JSON lines; `new` returns the records added since its last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0

    def new(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]  # the last line may be incomplete
        self._position += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def _is_alive(group: int) -> bool:
    """Whether a process group has a process that is not a zombie."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):  # macOS: the latter for a group of zombies
        return False
    # Zombies count as members, and stay in a container whose init process does not reap them.
    members = list(Path("/proc").glob("[0-9]*/stat"))
    for stat in members:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # PID (NAME) STATE PARENT GROUP ...; the name may have any character
            state, _, of = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(of) == group and state not in ("Z", "X"):
                return True
    return not members  # without /proc killpg decides


def end_like_an_error_on_signals() -> None:
    """Raise SystemExit on SIGTERM and SIGHUP, so that the children are ended, too."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, leave)


def environment() -> dict[str, str]:
    """Our environment without DILOCO_* settings; DILOCO_KERNELS stays, since it changes no bits."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DILOCO_") or name == "DILOCO_KERNELS"
    }
    return ours | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def ended(code: int | None) -> str:
    """How a process ended, in words.

    >>> ended(1), ended(-9)
    ('died with exit code 1', 'was killed by SIGKILL')
    """
    if code is None:
        return "does not respond"
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
