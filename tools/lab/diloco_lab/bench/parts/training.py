"""What the exchange costs training: asynchronous, streaming with overlap, and between boundaries."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer

from diloco_lab.bench.parts import Repeats, Size, Workers
from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.bench.report.arithmetic import against, in_turn
from diloco_lab.bench.report.figures import Figure, figure
from diloco_lab.driver.options import whole_numbers
from diloco_lab.driver.roles import RoleProcess, ask_all

ASYNCHRONOUS, STREAMING, ATTACHED = "asynchronous", "streaming", "hook attached, idle"
SIZE = "10M"  # of what is trained for real
# Streaming. One worker trains, beside the broker: on two cores each would have one of its own.
FRAGMENTS = 2
SYNC_EVERY = 10
ATTACHED_PARTS = 5  # that the steps are divided into, for the spread
FAR_AWAY = 1_000_000  # steps to the next boundary


def asynchronous(
    pool: ProcessPool,
    *,
    size: Size = "10M",
    workers: Workers = "2,4",
    seconds: Annotated[float, typer.Option(min=0.1, help="For each number of workers.")] = 5.0,
    repeats: Repeats = 5,
) -> list[Figure]:
    """Asynchronous pushes a second.

    Each with its outer step and the new version for its worker; nobody waits for the others.
    """
    figures = []
    for count in whole_numbers(workers):
        trainers = pool.roles("trainer", count)
        with pool.training(trainers, size, mode="async") as broker:
            ask_all(trainers, "round")
            broker.forget_turns()
            some_rounds = partial(_rounds, trainers, seconds / repeats)
            limits, found = in_turn(pool.raw, some_rounds, repeats)
            turn = broker.longest_turn_ms()
        pushes, speeds = zip(*found, strict=True)
        of_it = partial(figure, ASYNCHRONOUS, f"{size}, {count} workers")
        figures += [
            of_it("pushes", pushes, "/s"),
            of_it("in + out", speeds, "GB/s"),
            of_it("/ raw", against(speeds, [each.speed for each in limits]), "x"),
            of_it("longest turn", turn, "ms", target="turn"),
        ]
    return figures


def _rounds(trainers: Sequence[RoleProcess], seconds: float) -> tuple[float, float]:
    """Rounds a second and GB/s of all."""
    found = ask_all(trainers, "rounds_for", seconds=seconds)
    took = max(each["ended"] for each in found) - min(each["began"] for each in found)
    rounds, moved = (sum(each[name] for each in found) for name in ("rounds", "bytes"))
    return rounds / took, moved / 1e9 / took


def streaming(
    pool: ProcessPool,
    *,
    steps: Annotated[
        int, typer.Option(min=SYNC_EVERY, help="Training steps of each measurement.")
    ] = 40,
    repeats: Repeats = 2,
) -> list[Figure]:
    """Fragments with overlap: how much of the exchange is hidden behind training.

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
    trainer.ask("train", steps=SYNC_EVERY)  # everything happens for the first time
    found = trainer.ask("train", steps=steps)
    trainer.ask("leave")
    return found


def attached(
    pool: ProcessPool, *, steps: Annotated[int, typer.Option(min=ATTACHED_PARTS)] = 200
) -> list[Figure]:
    """A training step with the hook attached against one without.

    Each step is held against the other one beside it; each part of the steps gives a median.
    """
    with pool.broker(workers=1, sync_every=FAR_AWAY) as broker:
        (trainer,) = pool.roles("trainer")
        found = trainer.ask("compare", size=SIZE, address=broker.address, steps=steps)
    without, hooked = found["without"], found["attached"]
    pairs = [ours / alone for ours, alone in zip(hooked, without, strict=True)]
    ratios = [statistics.median(pairs[i::ATTACHED_PARTS]) for i in range(ATTACHED_PARTS)]
    of_it = partial(figure, ATTACHED, f"{SIZE}, {steps} steps each")
    return [
        of_it("step without", 1e3 * statistics.median(without), "ms"),
        of_it("step with", 1e3 * statistics.median(hooked), "ms"),
        of_it("ratio", ratios, "times", target="attached"),
    ]
