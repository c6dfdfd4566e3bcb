"""What an engine's run has left behind, compared with what it should be."""

import json
from pathlib import Path

from diloco_lab.chaos.audit import Findings, audit, log_of, read_lines, version_of

# Of the loss of a run without faults.
SPREAD = 0.03


def findings(broker_log: Path, folder: Path) -> Findings:
    """The audit of all incarnations of all workers that have written to this folder."""
    releases = read_lines(broker_log.read_text())
    logs = []
    for path in sorted(folder.glob("*.worker.jsonl")):
        worker, number, *_ = path.name.rsplit(".", 3)
        logs.append(log_of(worker, int(number), read_lines(path.read_text())))
    assert logs, f"no worker has written to {folder}"
    return audit(releases, [version_of(releases[-1]["version"])], logs)


def incarnations(folder: Path, worker: str) -> int:
    return len(list(folder.glob(f"{worker}.*.worker.jsonl")))


def losses(folder: Path) -> dict[str, float]:
    """Of the parameters that each worker held at the end of the run."""
    return {
        path.stem: float(json.loads(path.read_text())["loss"])
        for path in sorted(folder.glob("*.json"))
    }


def mean_loss(broker_log: Path, folder: Path, rounds: int, calm: float | None = None) -> float:
    """Nothing lost, nothing doubled, the loss as without faults. Returns the mean of the losses."""
    found = findings(broker_log, folder)
    assert found.problems == []
    assert len(found.lineage) == rounds + 1
    ends = losses(folder)
    mean = sum(ends.values()) / len(ends)
    assert calm is None or abs(mean / calm - 1) < SPREAD
    return mean
