"""The process of one attacker, at a low priority.

python -m diloco_lab.chaos.attacks.attacker JOB.json
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco_lab.chaos.attacks.peers import Scene, Tally
from diloco_lab.chaos.attacks.table import BY_NAME
from diloco_protocol.clients import find_keys

NICE = 5  # a third of the weight of others; with 19 it came to nothing where others were at work


@dataclass(frozen=True)
class Job:
    """What one attacker has to do.

    Attributes:
        keys: its key file; empty: none.
        folder: the broker's keys; empty where it asks for none.
        description: a file with the packed manifest of the run.
        result: the file to write the `Result` to.
    """

    attack: str
    address: str
    feed: str
    seconds: float
    seed: int
    keys: str
    folder: str
    description: str
    result: str


@dataclass(frozen=True)
class Result:
    """What it has done: from when to when, of the monotonic clock, and its CPU seconds."""

    began: float
    ended: float
    cpu: float
    tally: dict[str, Any]

    @property
    def of_it(self) -> Tally:
        return Tally(**self.tally)


def have_low_priority() -> None:
    """Leave the processors rather to those whose pace is measured.

    With autogroups Linux weighs sessions first, and nice values only within one.
    """
    os.nice(NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICE))


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def attack(job: Job) -> Result:
    """Do it; the time counts from when all is there that it needs."""
    scene = Scene(
        job.address,
        seconds=job.seconds,
        seed=job.seed,
        keys=find_keys(job.keys) if job.keys else None,
        folder=job.folder or None,
        description=Path(job.description).read_bytes() if job.description else b"",
        feed=job.feed,
    )
    began, cpu = time.monotonic(), cpu_seconds()
    try:
        BY_NAME[job.attack].act(scene)
        return Result(began, time.monotonic(), cpu_seconds() - cpu, asdict(scene.tally))
    finally:
        scene.close()


def main(path: Path) -> None:
    have_low_priority()
    job = Job(**json.loads(path.read_text()))
    found = attack(job)
    unfinished = Path(job.result + ".tmp")
    unfinished.write_text(json.dumps(asdict(found)))
    unfinished.rename(job.result)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
