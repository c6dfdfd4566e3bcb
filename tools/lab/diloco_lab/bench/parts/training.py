"""The cost of the exchange for training: streaming with overlap, and between boundaries."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.bench.report.figures import Figure, figure
from diloco_lab.driver.roles import RoleProcess

STREAMING, ATTACHED = "streaming", "hook attached, idle"
SIZE = "10M"  # of the trained model
# Streaming. One worker trains, beside the broker: on two cores each would have one of its own.
FRAGMENTS = 2
SYNC_EVERY = 10
ATTACHED_PARTS = 5  # that the steps are divided into, for the spread
FAR_AWAY = 1_000_000  # steps to the next boundary


def streaming(pool: ProcessPool, *, steps: int = 40, repeats: int = 2) -> list[Figure]:
    """Fragments with overlap: the part of the exchange that is hidden behind training.

    *Blocked* is the time that the optimizer's step spends in the hook. Part of it is the copy of a
    fragment out of the model and back into it, which is measured by itself, in memory that is there
    already; the rest is held against the time of all steps. *Hidden* is what a delay of tau = 2 steps
    saves of the time that the hook takes with tau = 0, where training waits for each reply.
    """
    (trainer,) = pool.roles("trainer")
    fragments: dict[str, Any] = {"num_fragments": FRAGMENTS, "fragment_pattern": "balanced"}
    a_run = partial(pool.broker, workers=1, sync_every=SYNC_EVERY, **fragments)
    with a_run(fragment_sync_delay=2) as overlapping, a_run(fragment_sync_delay=0) as waiting:
        late, at_once = [], []
        for _ in range(repeats):
            at_once.append(_train(trainer, waiting.address, steps))
            late.append(_train(trainer, overlapping.address, steps))
        turn = overlapping.longest_turn_ms()
    of_it = partial(figure, STREAMING, f"{SIZE}, P {FRAGMENTS}, H {SYNC_EVERY}, tau 2")
    hidden = [
        1 - sum(with_delay["hook"]) / sum(without["hook"])
        for with_delay, without in zip(late, at_once, strict=True)
    ]
    exchanges = steps / SYNC_EVERY  # of the whole model, each copied out and in
    blocked = [
        max(0.0, sum(each["hook"]) - 2 * exchanges * each["copy"]) / sum(each["steps"])
        for each in late
    ]
    times = FRAGMENTS * steps // SYNC_EVERY
    return [
        of_it("step", [1e3 * statistics.median(each["steps"]) for each in late], "ms"),
        of_it("hidden", hidden, "%"),
        of_it("hook, a fragment", [1e3 * sum(each["hook"]) / times for each in late], "ms"),
        of_it("of it the copy", [1e3 * 2 * each["copy"] / FRAGMENTS for each in late], "ms"),
        of_it("blocked beyond", blocked, "%", target="blocked"),
        of_it("longest turn", turn, "ms", target="turn"),
    ]


def _train(trainer: RoleProcess, address: str, steps: int) -> dict[str, Any]:
    trainer.ask("build", size=SIZE, trains=True)
    trainer.ask("join", address=address)
    trainer.ask("train", steps=SYNC_EVERY)  # warms up
    found = trainer.ask("train", steps=steps)
    trainer.ask("leave")
    return found


def attached(pool: ProcessPool, *, steps: int = 150) -> list[Figure]:
    """A training step with the hook attached, against the same without the time of hook and reports.

    The next boundary is far away. Each part of the steps gives a median.
    """
    (trainer,) = pool.roles("trainer")
    with pool.broker(workers=1, sync_every=FAR_AWAY) as broker:
        found = _train(trainer, broker.address, steps)
    whole = found["steps"]
    of_ours = [sum(each) for each in zip(found["hook"], found["reports"], strict=True)]
    ratios = [step / (step - ours) for step, ours in zip(whole, of_ours, strict=True)]
    parts = [statistics.median(ratios[i::ATTACHED_PARTS]) for i in range(ATTACHED_PARTS)]
    of_it = partial(figure, ATTACHED, f"{SIZE}, {steps} steps")
    return [
        of_it("step", 1e3 * statistics.median(whole), "ms"),
        of_it("of it hook and report", 1e3 * statistics.median(of_ours), "ms"),
        of_it("with / without", parts, "times", target="attached"),
    ]
