"""The whole synchronous round: from the last push's start until all have the parameters in the model.

Workers are processes with a GPT-shaped model and the real hook. They start each round together, so
the last push starts when all do. Counted are the bytes on both of a worker's connections, headers
included. And what such a round costs with keys, and through a socket file.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from diloco_lab.bench.process_pool import BrokerProcess, ProcessPool
from diloco_lab.bench.report.figures import Figure, against, around, figure, in_turn, slope
from diloco_lab.bench.sizes import parameters_of
from diloco_lab.driver import machine
from diloco_lab.driver.options import make_keys
from diloco_lab.driver.roles import RoleProcess, ask_all

WHOLE_ROUND, COST_PART = "whole round", "what a round costs"
OVER_WORKERS = "memory, over workers"
SAME_HOST, WITH_KEYS = "rounds on the broker's machine", "round with keys"
FP32 = 4
# Copies of the parameters in fp32 that must fit into memory, with a reserve.
WORKER_HOLDS, BROKER_HOLDS = 4, 5
COMPARED_WORKERS = 2  # of each of two runs side by side
# Warm-up rounds, after which all memory is allocated: the broker keeps the codes of eight versions.
FIRST_ROUNDS = 9


class Round(NamedTuple):
    """One round: seconds, GB up and down of all workers, CPU seconds of the broker and each worker."""

    seconds: float
    up: float
    down: float
    cpu: float
    workers_cpu: tuple[float, ...]

    @property
    def all_cpu(self) -> float:
        """CPU seconds of all processes."""
        return self.cpu + sum(self.workers_cpu)


def row_of(size: str, workers: int, reply: str = "") -> str:
    """The row of a configuration."""
    return f"{size}, {workers} worker{'s' if workers > 1 else ''}{reply and f', {reply}'}"


def one_round(
    trainers: Sequence[RoleProcess], broker: BrokerProcess, normal: bool = False
) -> Round:
    """Let all workers make a boundary at the same time.

    It lasts from the start of the last push until the last worker has the parameters in its model.
    `normal`: with pseudo-gradients of normal values.
    """
    ask_all(trainers, "drift", normal=normal)
    cpu = broker.cpu_seconds
    workers_cpu = [machine.cpu_seconds(each.pid) for each in trainers]
    found = ask_all(trainers, "round")
    return Round(
        max(each["ended"] for each in found) - max(each["began"] for each in found),
        sum(each["up"] for each in found) / 1e9,
        sum(each["down"] for each in found) / 1e9,
        broker.cpu_seconds - cpu,
        tuple(
            machine.cpu_seconds(each.pid) - before
            for each, before in zip(trainers, workers_cpu, strict=True)
        ),
    )


def warm_up(a_round: Callable[[], Round]) -> None:
    """Make the rounds that allocate memory."""
    for _ in range(FIRST_ROUNDS):
        a_round()


def has_room(
    pool: ProcessPool, row: str, size: str, workers: int, *, runs: int = 1, more: int = 0
) -> bool:
    """Whether `runs` runs of these workers fit into memory; if not, the row is noted as skipped.

    `more` are further copies of the parameters in each run.
    """
    copies = runs * (workers * WORKER_HOLDS + BROKER_HOLDS + more)
    return pool.has_memory(copies * FP32 * parameters_of(size) / 1e9, row)


def whole_round(
    pool: ProcessPool, *, size: str, workers: int, reply: str, repeats: int
) -> list[Figure]:
    """Rounds of one configuration: time, bytes, CPU, memory."""
    parameters, row = parameters_of(size), row_of(size, workers, reply)
    if not has_room(pool, f"{WHOLE_ROUND}, {row}", size, workers):
        return []
    trainers = pool.roles("trainer", workers)
    with pool.training(trainers, size, reply_dtype=reply) as broker:
        warm_up(partial(one_round, trainers, broker))
        broker.forget_turns()
        limits, rounds = in_turn(pool.raw, lambda: one_round(trainers, broker), repeats)
        turn = broker.longest_turn_ms()
        beyond = broker.beyond_state(parameters)
        held = [each["beyond"] / (FP32 * parameters) for each in ask_all(trainers, "memory")]
    speeds = [(each.up + each.down) / each.seconds for each in rounds]
    receive = around([each.receive_cpu for each in limits])
    send = around([each.send_cpu for each in limits])
    of_raw = [  # the broker's CPU, against raw TCP's for receiving and sending as much
        each.cpu / (each.up * receives + each.down * sends)
        for each, receives, sends in zip(rounds, receive, send, strict=True)
    ]
    target = "round" if size == "125M" and workers in (2, 4) else None
    memory_target = "broker memory" if workers == 2 else None
    of_it, cost = partial(figure, WHOLE_ROUND, row), partial(figure, COST_PART, row)
    return [
        of_it("seconds", [each.seconds for each in rounds], "s"),
        of_it("in + out", speeds, "GB/s"),
        of_it("/ raw", against(speeds, [each.speed for each in limits]), "x", target=target),
        cost("broker CPU", [each.cpu / (each.up + each.down) for each in rounds], "s/GB"),
        cost("broker CPU / raw", of_raw, "x", target="cpu"),
        cost("longest turn", turn, "ms", target="turn"),
        cost("broker beyond state", beyond, "MB", target=memory_target),
        cost("worker / fp32", held, "x", target="worker memory"),
    ]


def with_keys(pool: ProcessPool, *, size: str = "50M", repeats: int = 5) -> list[Figure]:
    """Encrypted rounds, with keys, against ones without."""
    folder = pool.folder / "keys"
    shutil.rmtree(folder, ignore_errors=True)
    names = (each.name for each in pool.roles("trainer", 2 * COMPARED_WORKERS))
    make_keys(pool, folder, *names)
    try:
        return _compared(pool, WITH_KEYS, size, repeats, keys=folder)
    finally:
        shutil.rmtree(folder)


def same_host(pool: ProcessPool, *, size: str = "50M", repeats: int = 7) -> list[Figure]:
    """Rounds through the broker's socket file, against ones by TCP over loopback."""
    return _compared(pool, SAME_HOST, size, repeats, ipc=True)


def _compared(
    pool: ProcessPool, part: str, size: str, repeats: int, **options: Any
) -> list[Figure]:
    """Rounds of a usual run and of one with these options, in turn; both run side by side."""
    if not has_room(pool, part, size, COMPARED_WORKERS, runs=2):
        return []
    both = pool.roles("trainer", 2 * COMPARED_WORKERS)
    usual, other = both[:COMPARED_WORKERS], both[COMPARED_WORKERS:]
    with (
        pool.training(usual, size) as plain,
        pool.training(other, size, **options) as changed,
    ):
        a_usual, another = partial(one_round, usual, plain), partial(one_round, other, changed)
        warm_up(a_usual)
        warm_up(another)
        limits, rounds = in_turn(a_usual, another, repeats)
    of_it = partial(figure, part, row_of(size, COMPARED_WORKERS))
    found = []
    for name, measure in (("round", attrgetter("seconds")), ("CPU of all", attrgetter("all_cpu"))):
        before, after = (list(map(measure, of)) for of in (limits, rounds))
        found += [
            of_it(f"{name}, without", before, "s"),
            of_it(f"{name}, with", after, "s"),
            of_it(f"{name}, ratio", against(after, before), "x"),
        ]
    return found


def growth(figures: Sequence[Figure]) -> list[Figure]:
    """The broker's memory over the number of workers: the slope of a straight line."""
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for each in figures:
        if (each.part, each.name) == (COST_PART, "broker beyond state"):
            size, workers, reply = each.of.split(", ")
            lines[f"{size}, {reply}"].append((int(workers.split()[0]), each.median))
    return [
        figure(OVER_WORKERS, row, "a worker", line, "MB", target="broker growth")
        for row, points in lines.items()
        if (line := slope(points)) is not None
    ]
