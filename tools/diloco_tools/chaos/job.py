"""What one process of a worker has to do, and how far it has come: files between it and the drill."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """What one process of a worker has to do. Paths are absolute.

    Attributes:
        server: where to connect to.
        shard: the text to train on.
        seed: of the batches.
        pause: seconds of sleep behind each step: stands for a larger model.
        steps: file of 8 bytes with the inner steps trained so far, little-endian.
        audit: the worker's own log of its pushes.
        finish: as soon as this file exists, training comes to its end.
        pull: as soon as this one exists, the final version is pulled; empty: none is.
        patience: seconds to wait for `pull`.
        result: JSON file for what has come of it.
    """

    worker: str
    server: str
    shard: str
    seed: int
    pause: float
    steps: str
    audit: str
    finish: str
    pull: str
    patience: float
    result: str

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def steps_in(path: Path) -> int:
    """What a StepCount has written; 0 where there is none yet."""
    return int.from_bytes(path.read_bytes(), "little") if path.exists() else 0
