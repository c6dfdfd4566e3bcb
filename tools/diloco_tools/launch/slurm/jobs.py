"""The jobs of a run in Slurm's queue: submitted, listed, stopped in order."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

from diloco_protocol.errors import UsageError
from diloco_tools.launch.commands import output_of
from diloco_tools.launch.slurm.folder import STOP
from diloco_tools.launch.slurm.scripts import BROKER, ISLANDS, SlurmRun

POLL_S = 1.0  # between two polls of the queue
# States of a job without processes: cancelling it loses nothing.
WITHOUT_PROCESSES = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD")


@dataclass(frozen=True)
class Job:
    """A line of the queue."""

    number: str  # as scancel takes it; of an array with its element
    name: str
    state: str
    elapsed: str
    nodes: str
    reason: str

    @property
    def island(self) -> str:
        return self.number.partition("_")[2]


def check_there() -> None:
    """Raise UsageError if Slurm is missing."""
    missing = [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]
    if missing:
        raise UsageError(
            f"{missing[0]} is missing; run this on a host that submits jobs to Slurm, or write the "
            "scripts without --submit and submit them there."
        )


def submit(run: SlurmRun) -> list[str]:
    """Numbers of the broker's job and of the islands' array.

    Raises:
        UsageError: Slurm rejects one of them, or jobs of this run are in the queue.
    """
    check_there()
    if queued(run):
        raise UsageError(
            f"Jobs of the run {run.name} are in the queue; stop them first (diloco-launch slurm stop "
            f"{run.folder}), or give another --name."
        )
    numbers: list[str] = []
    for script in (BROKER, ISLANDS):
        try:
            said = output_of(["sbatch", "--parsable", str(run.folder / script)], cwd=run.start_in)
        except UsageError:
            for number in numbers:  # do not leave half of a run behind
                output_of(["scancel", number])
            raise
        numbers.append(said.strip().partition(";")[0])
    return numbers


def queued(run: SlurmRun) -> list[Job]:
    """All jobs of this run that are not over, the broker's first. Raises UsageError."""
    words = ["squeue", "--me", "--noheader", "--array"]
    words += [f"--name={run.broker_job},{run.islands_job}", "--format=%i|%j|%T|%M|%N|%r"]
    jobs = [Job(*line.split("|")) for line in output_of(words).splitlines() if line.count("|") == 5]
    return sorted(jobs, key=lambda job: (job.name != run.broker_job, len(job.number), job.number))


def stop(run: SlurmRun, within_s: float, tell: Callable[[str], object]) -> None:
    """Stop the islands, then the broker, which saves; cancel those that do not end in time.

    Args:
        within_s: seconds for the islands, and again for the broker.

    Raises UsageError.
    """
    check_there()
    (run.folder / STOP).touch()
    for name in (run.islands_job, run.broker_job):
        jobs = [job for job in queued(run) if job.name == name]
        waiting = [job.number for job in jobs if job.state in WITHOUT_PROCESSES]
        running = [job.number for job in jobs if job.state not in WITHOUT_PROCESSES]
        if waiting:
            output_of(["scancel", *waiting])
        if running:
            tell(f"SIGTERM for {name}: {', '.join(running)}")
            output_of(["scancel", "--signal=TERM", *running])
        left = _left(run, name, within_s)
        if left:
            tell(f"{name} did not end within {within_s:g} s; cancelling {', '.join(left)}")
            output_of(["scancel", *left])


def _left(run: SlurmRun, name: str, within_s: float) -> list[str]:
    """Jobs that are still in the queue after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while left := [job.number for job in queued(run) if job.name == name]:
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    return left
