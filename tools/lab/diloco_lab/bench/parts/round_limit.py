"""What a whole round would take at least on this machine, in CPU seconds, and ours beside it.

The bytes of the round go over raw TCP from memory of the model's size into as much, so neither end finds
them in its cache. Then the least that has to be done to the tensors: each worker's delta, its fold, one
outer step, each worker's apply, every one measured alone on more memory than a cache holds. All of it
divided by the cores is how soon a round could be over where they are all busy until its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Annotated, NamedTuple

import typer

from diloco_lab.bench.parts import Repeats, Size
from diloco_lab.bench.parts.rounds import FP32, has_room, one_round, row_of
from diloco_lab.bench.process_pool import Ends, ProcessPool
from diloco_lab.bench.report.arithmetic import against, in_turn
from diloco_lab.bench.report.figures import Figure, figure
from diloco_lab.bench.roles.wire import CALL_BYTES
from diloco_lab.bench.sizes import parameters_of
from diloco_lab.driver import machine

ROUND_LIMIT, OURS = "limit of a round", "a round against its limit"
UP_BYTES, DOWN_BYTES = 2, 4  # a parameter: bf16 and fp32
KERNEL_CHUNKS = 256  # of each measurement: four times through the memory of the kernels
# To apply is to copy what came into the model.
KERNELS = {"delta": "delta", "fold": "fold", "outer_step": "outer_step", "apply": "memcpy"}


class Limit(NamedTuple):
    """CPU seconds of one round, of all processes: for its bytes, and for its tensors."""

    wire: float
    work: float

    @property
    def cpu(self) -> float:
        return self.wire + self.work


def least_cpu(workers: int, billions: float, work: Mapping[str, float]) -> float:
    """CPU seconds that the tensors of a round take at least, of all processes.

    Args:
        workers: each has a delta, which is folded, and an apply; the outer step is taken once.
        billions: of parameters.
        work: seconds for a billion parameters of `delta`, `fold`, `outer_step` and `apply`.
    """
    of_each = work["delta"] + work["fold"] + work["apply"]
    return billions * (workers * of_each + work["outer_step"])


def round_limit(
    pool: ProcessPool,
    *,
    size: Size = "125M",
    workers: Annotated[int, typer.Option(min=1)] = 2,
    repeats: Repeats = 5,
) -> list[Figure]:
    """The least that a round takes on this machine, in CPU seconds, and what ours takes.

    bf16 up and fp32 down, in turn.
    """
    parameters, row = parameters_of(size), row_of(size, workers)
    # The ends of raw TCP hold a model each.
    if not has_room(pool, f"{ROUND_LIMIT}, {row}", size, workers, more=2):
        return []
    kernels, trainers = pool.role("kernels"), pool.roles("trainer", workers)
    ends = Ends(pool.role("raw", "memory-sender"), pool.role("raw", "memory-receiver"))
    ends.connect()
    for each in ends:
        each.ask("hold", calls=math.ceil(FP32 * parameters / CALL_BYTES))
    bytes_moved = workers * (UP_BYTES + DOWN_BYTES) * parameters

    def limit() -> Limit:
        raw = ends.move(bytes_moved)
        wire = (raw.send_cpu + raw.receive_cpu) * bytes_moved / 1e9
        work = {
            name: kernels.ask(kernel, chunks=KERNEL_CHUNKS)["cpu"]
            for name, kernel in KERNELS.items()
        }
        return Limit(wire, least_cpu(workers, parameters / 1e9, work))

    ends.move(bytes_moved)  # the first one lets the kernel's buffers grow
    with pool.training(trainers, size) as broker:
        one_round(trainers, broker)  # memory is taken for the first time
        limits, rounds = in_turn(limit, lambda: one_round(trainers, broker), repeats)
    pool.dismiss("memory-", "kernels")
    cores = machine.describe()["cores"]
    soonest = [each.cpu / cores for each in limits]
    ours = [each.all_cpu for each in rounds]
    seconds = [each.seconds for each in rounds]
    limit_of = partial(figure, ROUND_LIMIT, row, note=f"{cores} cores")
    ours_of = partial(figure, OURS, row)
    return [
        limit_of("raw TCP CPU", [each.wire for each in limits], "s"),
        limit_of("tensor CPU", [each.work for each in limits], "s"),
        limit_of("all CPU", [each.cpu for each in limits], "s"),
        limit_of("over the cores", soonest, "s"),
        ours_of("CPU", ours, "s"),
        ours_of("CPU / limit", against(ours, [each.cpu for each in limits]), "x"),
        ours_of("round", seconds, "s"),
        ours_of("round / limit", against(seconds, soonest), "x"),
    ]
