"""One process of a worker: what it has to do, the files between it and the drill, and its fate."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from diloco_tools.processes import Child

# Files of a process, named NAME.LIFE and one of these.
JOB = "job.json"  # what it is started with
STEPS = "steps"  # 8 bytes: the inner steps trained so far, little-endian
AUDIT = "worker.jsonl"  # its own log of its pushes
RESULT = "result.json"  # what has come of it


@dataclass(frozen=True)
class Job:
    """What one process of a worker has to do."""

    worker: str
    number: int  # of the worker's processes: 1, 2, ...
    server: str  # where it trains
    broker: str  # where it pulls the final version
    folder: str  # for its files; absolute, like the path of the text
    shard: str  # the text to train on
    seed: int  # of the batches
    pause: float  # seconds of sleep behind each step: stands for a larger model
    pulls: bool  # in the end it waits for the others and pulls the final version

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls(**json.loads(path.read_text()))

    def write(self) -> Path:
        """Write it to the file that the process is started with."""
        path = self.file(JOB)
        path.write_text(json.dumps(asdict(self)))
        return path

    @property
    def name(self) -> str:
        return f"{self.worker}.{self.number}"

    def file(self, kind: str) -> Path:
        return Path(self.folder) / f"{self.name}.{kind}"

    @property
    def finish(self) -> Path:
        """As soon as it exists training comes to its end; newcomers have one of their own."""
        return Path(self.folder) / ("finish" if self.pulls else f"finish.{self.worker}")

    @property
    def pull(self) -> Path:
        """As soon as it exists the final version is pulled."""
        return Path(self.folder) / "pull"


@dataclass
class Life:
    """One process of a worker, from its start to its end. Times are of the monotonic clock."""

    job: Job
    child: Child
    joined_at: float | None = None  # when it was seen to have joined
    ended_at: float | None = None  # when it was killed, or seen to have left
    was_killed: bool = False
    stops: list[tuple[float, float]] = field(default_factory=list)  # from when to when

    @property
    def steps(self) -> int:
        """Inner steps that it has trained so far."""
        path = self.job.file(STEPS)
        return int.from_bytes(path.read_bytes(), "little") if path.exists() else 0

    def is_alive_throughout(self, start: float, end: float) -> bool:
        """Had it joined before, did it stay beyond, and did nobody stop it in between?"""
        if self.joined_at is None or self.joined_at >= start:
            return False
        if self.ended_at is not None and self.ended_at <= end:
            return False
        return not any(began < end and over > start for began, over in self.stops)
