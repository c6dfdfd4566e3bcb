"""The folder of a run on Slurm, which all nodes share: scripts, keys, logs, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from diloco_protocol.errors import UsageError
from diloco_tools.launch.commands import make_keys
from diloco_tools.launch.slurm.scripts import (
    BROKER,
    ENDED,
    ISLANDS,
    SlurmRun,
    broker_script,
    islands_script,
)

SETTINGS = "launch.json"
STOP = "stop"  # while this file exists no job is requeued
LOGS, ENDS, KEYS = "logs", "ends", "keys"


def write(run: SlurmRun) -> None:
    """Make the folder, or update its scripts. Existing keys, checkpoints and logs stay.

    Raises UsageError.
    """
    folder = run.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (LOGS, ENDS):
            (folder / name).mkdir(exist_ok=True)
        for former in (STOP, ENDED):
            (folder / former).unlink(missing_ok=True)
        (folder / BROKER).write_text(broker_script(run))
        (folder / ISLANDS).write_text(islands_script(run))
        (folder / SETTINGS).write_text(json.dumps(run.as_plain(), indent=2) + "\n")
    except OSError as error:
        raise UsageError(
            f"{error.filename} cannot be written: {error.strerror}; give a --folder in which you may "
            "write, on the file system that all nodes share."
        ) from None
    make_keys(folder / KEYS, run.workers)


def read(folder: Path) -> SlurmRun:
    """The settings of the run in this folder. Raises UsageError."""
    file = folder / SETTINGS
    try:
        plain = json.loads(file.read_text())
        return SlurmRun.from_plain(plain)
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror}; give the folder of a run that diloco-launch "
            "slurm made."
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{file} is damaged; run diloco-launch slurm start again.") from None


def last_line(file: Path) -> str:
    """The last line of a log; empty if there is none."""
    try:
        with file.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - 4096))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
