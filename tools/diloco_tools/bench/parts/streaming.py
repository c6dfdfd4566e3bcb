"""Streaming with overlap: real training, two fragments, and how long the training thread stands still.

*Blocked* is the time that the optimizer's step spends in the hook. Part of it is the copy of a
fragment out of the model and back into it, which is measured by itself, in memory that is there
already; the rest is held against the time of all steps. *Hidden* is what a delay of tau = 2 steps
saves of the time that the hook takes with tau = 0, where training waits for each reply.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.report.figures import Figure, figure
from diloco_tools.bench.role_process import RoleProcess

PART = "streaming"
FRAGMENTS = 2
SYNC_EVERY = 10
SIZE = "10M"
WORKER = 1  # one trains, beside the broker: on two cores that is what they would have of their own


def measure(pool: ProcessPool, *, steps: int, repeats: int) -> list[Figure]:
    """One worker and its broker; with tau = 2 and with tau = 0 in turn."""
    (trainer,) = pool.trainers(WORKER)
    with pool.broker(*_options(2)) as overlapping, pool.broker(*_options(0)) as waiting:
        late, at_once = [], []
        for _ in range(repeats):
            at_once.append(_train(trainer, waiting.address, steps))
            late.append(_train(trainer, overlapping.address, steps))
        turn = overlapping.longest_turn_ms()
    of_it = partial(figure, PART, f"{SIZE}, P {FRAGMENTS}, H {SYNC_EVERY}, tau 2")
    step = [1e3 * statistics.median(each["steps"]) for each in late]
    hidden = [
        1 - sum(with_delay["hook"]) / sum(without["hook"])
        for with_delay, without in zip(late, at_once, strict=True)
    ]
    blocked = [_blocked(each) / sum(each["steps"]) for each in late]
    slots = FRAGMENTS * steps // SYNC_EVERY
    each_time = [1e3 * sum(each["hook"]) / slots for each in late]
    copy = [1e3 * 2 * each["copy"] / FRAGMENTS for each in late]
    return [
        of_it("step", step, "ms"),
        of_it("hidden", hidden, "%"),
        of_it("hook, a fragment", each_time, "ms"),
        of_it("of it the copy", copy, "ms"),
        of_it("blocked beyond", blocked, "%", target="blocked"),
        of_it("longest turn", turn, "ms", target="turn"),
    ]


def _options(tau: int) -> tuple[str, ...]:
    return (
        *("--workers", str(WORKER), "--sync-every", str(SYNC_EVERY)),
        *("--num-fragments", str(FRAGMENTS), "--fragment-pattern", "balanced"),
        *("--fragment-sync-delay", str(tau)),
    )


def _train(trainer: RoleProcess, server: str, steps: int) -> dict[str, Any]:
    trainer.ask("build", size=SIZE, trains=True)
    trainer.ask("join", server=server, worker_id="streaming")
    trainer.ask("train", steps=SYNC_EVERY)  # everything happens for the first time
    found = trainer.ask("train", steps=steps)
    trainer.ask("leave")
    return found


def _blocked(found: dict[str, Any]) -> float:
    """Seconds in the hook beyond copying each fragment out and in, H/P steps apart."""
    exchanges = len(found["steps"]) / SYNC_EVERY  # of the whole model
    return float(max(0.0, sum(found["hook"]) - 2 * exchanges * found["copy"]))
