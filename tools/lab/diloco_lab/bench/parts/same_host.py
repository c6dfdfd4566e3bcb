"""Rounds of workers on the broker's machine: through its socket file, against TCP over loopback."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from diloco_lab.bench.options import Repeats, Size
from diloco_lab.bench.parts.rounds import BROKER_HOLDS, FP32, WORKER_HOLDS, one_round, row_of
from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.bench.report.arithmetic import against, in_turn
from diloco_lab.bench.report.figures import Figure, figure
from diloco_lab.bench.sizes import parameters_of

SAME_HOST = "rounds on the broker's machine"


def same_host(
    pool: ProcessPool,
    *,
    size: Size = "50M",
    workers: Annotated[int, typer.Option(min=1)] = 2,
    repeats: Repeats = 7,
) -> list[Figure]:
    """Rounds through the broker's socket file, against TCP over loopback, in turn."""
    copies = 2 * (workers * WORKER_HOLDS + BROKER_HOLDS)
    if not pool.has_memory(copies * FP32 * parameters_of(size) / 1e9, SAME_HOST):
        return []
    both = pool.roles("trainer", 2 * workers)
    over_tcp, near = both[:workers], both[workers:]
    with pool.training(over_tcp, size) as tcp, pool.training(near, size, ipc=True) as ipc:
        one_round(over_tcp, tcp)  # memory is taken for the first time
        one_round(near, ipc)
        limits, rounds = in_turn(
            lambda: one_round(over_tcp, tcp), lambda: one_round(near, ipc), repeats
        )
    of_it = partial(figure, SAME_HOST, row_of(size, workers))
    seconds, nearer = ([each.seconds for each in of] for of in (limits, rounds))
    cpu, less = ([each.all_cpu for each in of] for of in (limits, rounds))
    return [
        of_it("TCP", seconds, "s"),
        of_it("socket file", nearer, "s"),
        of_it("times as fast", [1 / each for each in against(nearer, seconds)], "x"),
        of_it("CPU over TCP", cpu, "s"),
        of_it("CPU ratio", against(less, cpu), "x"),
    ]
