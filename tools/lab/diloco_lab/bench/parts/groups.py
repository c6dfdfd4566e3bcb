"""A round of workers of two processes each, against one of as many workers of one process.

The processes of a worker have the whole model each, as with DDP, and each sends and takes its half of
the chunks. On one machine they share its cores and its memory, so a worker of two cannot be faster here:
what is measured is what it costs that they are several.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from functools import partial

from diloco_lab.bench.parts import Repeats, Size
from diloco_lab.bench.parts.rounds import (
    FP32,
    has_room,
    one_round,
    row_of,
)
from diloco_lab.bench.process_pool import BrokerProcess, ProcessPool
from diloco_lab.bench.report.arithmetic import against, in_turn
from diloco_lab.bench.report.figures import Figure, figure
from diloco_lab.bench.sizes import parameters_of
from diloco_lab.driver.roles import RoleProcess, ask_all

GROUPS = "workers of several processes"
WORKERS, PROCESSES = 2, 2


def groups(pool: ProcessPool, *, size: Size = "125M", repeats: Repeats = 5) -> list[Figure]:
    """Rounds of 2 workers of 2 processes each, against 2 workers of one: time and memory."""
    parameters, row = parameters_of(size), f"{row_of(size, WORKERS)} x {PROCESSES}"
    if not has_room(pool, f"{GROUPS}, {row}", size, WORKERS, runs=2, more=PROCESSES):
        return []
    trainers = pool.roles("trainer", WORKERS + WORKERS * PROCESSES)
    plain, several = trainers[:WORKERS], trainers[WORKERS:]
    with pool.training(plain, size) as one, in_groups(pool, several, size) as many:
        a_plain, another = partial(one_round, plain, one), partial(one_round, several, many)
        a_plain()  # memory is taken for the first time
        another()
        alone, together = in_turn(a_plain, another, repeats)
        memory = [
            [each["beyond"] / (FP32 * parameters) for each in ask_all(of, "memory")]
            for of in (plain, several)
        ]
    of_it = partial(figure, GROUPS, row)
    seconds, with_several = ([each.seconds for each in of] for of in (alone, together))
    return [
        of_it("1 process", seconds, "s"),
        of_it("2 processes", with_several, "s"),
        of_it("ratio", against(with_several, seconds), "x"),
        of_it("copies in 1", memory[0], "x"),
        of_it("in each of 2", memory[1], "x"),
    ]


@contextlib.contextmanager
def in_groups(
    pool: ProcessPool, trainers: Sequence[RoleProcess], size: str
) -> Iterator[BrokerProcess]:
    """A run in which each two of these roles are one worker, with a boundary behind each step."""
    with pool.broker(workers=WORKERS, sync_every=1) as broker:
        for worker in range(WORKERS):
            ranks = trainers[worker * PROCESSES : (worker + 1) * PROCESSES]
            port = _free_port()
            for rank, each in enumerate(ranks):
                each.tell("meet", port=port, rank=rank, count=len(ranks))
        for each in trainers:
            each.hear()
        ask_all(trainers, "build", size=size)
        ask_all(trainers, "join", address=broker.address, together=True)
        yield broker
        ask_all(trainers, "leave")


def _free_port() -> int:
    """For the processes of one worker to find each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
