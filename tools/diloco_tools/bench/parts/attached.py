"""What the hook costs a training step between boundaries: training with and without it, in turn."""

from __future__ import annotations

import statistics
from functools import partial

from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.report.figures import Figure, figure

PART = "hook attached, idle"
SIZE = "10M"
PARTS = 5  # that the steps are divided into, for the spread
FAR_AWAY = 1_000_000  # steps to the next boundary


def measure(pool: ProcessPool, *, steps: int) -> list[Figure]:
    """Each step is held against the other one beside it; each part of the steps gives a median."""
    (trainer,) = pool.trainers(1)
    with pool.broker("--workers", "1", "--sync-every", str(FAR_AWAY)) as broker:
        found = trainer.ask("compare", size=SIZE, server=broker.address, steps=steps)
    without, attached = found["without"], found["attached"]
    pairs = [ours / alone for ours, alone in zip(attached, without, strict=True)]
    ratios = [statistics.median(pairs[i::PARTS]) for i in range(PARTS)]
    of_it = partial(figure, PART, f"{SIZE}, {steps} steps each")
    return [
        of_it("step without", 1e3 * statistics.median(without), "ms"),
        of_it("step with", 1e3 * statistics.median(attached), "ms"),
        of_it("ratio", ratios, "times", target="attached"),
    ]
