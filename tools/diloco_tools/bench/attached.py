"""What the hook costs a training step between boundaries: training with and without it, in turn."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from diloco_tools.bench.figures import Figure, figure

if TYPE_CHECKING:
    from diloco_tools.bench.stage import Stage

PART = "hook attached, idle"
SIZE = "10M"
PARTS = 5  # that the steps are divided into, for the spread
FAR_AWAY = 1_000_000  # steps to the next boundary


def measure(stage: Stage, *, steps: int) -> list[Figure]:
    """Each step is held against the other one beside it; each part of the steps gives a median."""
    (trainer,) = stage.trainers(1)
    with stage.broker("--workers", "1", "--sync-every", str(FAR_AWAY)) as broker:
        found = trainer.ask("compare", size=SIZE, server=broker.address, steps=steps)
    without, attached = found["without"], found["attached"]
    pairs = [ours / alone for ours, alone in zip(attached, without, strict=True)]
    ratios = [statistics.median(pairs[i::PARTS]) for i in range(PARTS)]
    row = f"{SIZE}, {steps} steps each"
    return [
        figure(PART, row, "step without", 1e3 * statistics.median(without), "ms"),
        figure(PART, row, "step with", 1e3 * statistics.median(attached), "ms"),
        figure(PART, row, "ratio", ratios, "times", "attached"),
    ]
