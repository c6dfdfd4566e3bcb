"""What a drill that was killed has left in its folder: processes, which the next drill ends, and files.

Each process is noted as it starts, by its id and the time at which it started: an id alone may belong to
another process by now.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

from diloco_lab.chaos.audit import BROKER_LOG
from diloco_tools.processes import JsonLines

PROCESSES = "processes.jsonl"  # in each folder of a drill
ENDS_WITHIN_S = 10.0  # after SIGKILL
BOOT = Path("/proc/sys/kernel/random/boot_id")


def started(pid: int) -> str | None:
    """When the process with this id started, in some words; None where there is none."""
    try:
        # PID (NAME) STATE ...; the name may have any character. A zombie has ended.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else f"{fields[19]} ticks after boot {BOOT.read_text()}"


def note(folder: Path, pid: int) -> None:
    """A process of the drill in this folder has started."""
    with (folder / PROCESSES).open("a") as file:
        file.write(json.dumps({"pid": pid, "started": started(pid)}) + "\n")


def running(folder: Path) -> list[int]:
    """Which of the processes that were noted in this folder still run."""
    noted = [(each["pid"], each["started"]) for each in JsonLines(folder / PROCESSES).new()]
    return [pid for pid, at in noted if at is not None and started(pid) == at]


def end(folder: Path) -> None:
    """End the processes, and those that they have started, of an earlier drill in this folder."""
    pids = running(folder)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # each leads a group
    until = time.monotonic() + ENDS_WITHIN_S
    while running(folder) and time.monotonic() < until:
        time.sleep(0.02)


def empty(folder: Path) -> None:
    """Make this folder, or end and remove what an earlier drill has left in it.

    Raises:
        OSError: there is something else in it.
    """
    if folder.exists() and any(folder.iterdir()):
        if not any((folder / name).exists() for name in (PROCESSES, BROKER_LOG)):
            raise FileExistsError(f"{folder} holds something that is not of a drill")
        for each in sorted(folder.rglob(PROCESSES)):
            end(each.parent)
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PROCESSES).touch()


def claim(out: Path) -> None:
    """This process works in this folder from now on.

    Raises:
        OSError: another drill does, and is alive.
    """
    out.mkdir(parents=True, exist_ok=True)
    others = [pid for pid in running(out) if pid != os.getpid()]
    if others:
        raise FileExistsError(f"process {others[0]} is a drill that works there")
    (out / PROCESSES).unlink(missing_ok=True)
    note(out, os.getpid())
