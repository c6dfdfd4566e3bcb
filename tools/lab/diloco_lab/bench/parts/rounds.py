"""The whole synchronous round: from the last push's start until all have the parameters in the model.

Workers are processes with a GPT-shaped model and the real hook. They start each round together, so
the last push starts when all do. Counted are the bytes on both of a worker's connections, headers
included. And what such a round costs with keys, through a socket file, while a checkpoint is being
written, and by workers of two processes: these have the whole model each, as with DDP, and each sends
and takes its half of the chunks. On one machine they share its cores and its memory, so a worker of two
cannot be faster here.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import typer

from diloco_lab.bench.parts import Repeats, ReplyDtypes, Size, Sizes, Workers
from diloco_lab.bench.process_pool import BrokerProcess, ProcessPool
from diloco_lab.bench.report.arithmetic import PHASES, against, around, in_turn, slope
from diloco_lab.bench.report.figures import Figure, Parts, figure
from diloco_lab.bench.sizes import parameters_of
from diloco_lab.driver import machine
from diloco_lab.driver.options import whole_numbers, words
from diloco_lab.driver.roles import RoleProcess, ask_all
from diloco_protocol.feed import Snapshot

WHOLE_ROUND, PHASES_OF_ROUNDS = "whole round", "phases of a round"
COST_PART = "what a round costs"
OVER_WORKERS, OVER_PARAMETERS = "memory, over workers", "time, over parameters"
CHECKPOINT = "checkpoint"
SAME_HOST = "rounds on the broker's machine"
WITH_KEYS = "round with keys"
# Rounds with the counters sampled, for their phases; the sampling costs a little, so they are apart.
SAMPLED = 2
FP32 = 4
# Copies of the parameters in fp32 that there must be room for, with some to spare.
WORKER_HOLDS, BROKER_HOLDS = 4, 5


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


def has_room(
    pool: ProcessPool, row: str, size: str, workers: int, *, runs: int = 1, more: int = 0
) -> bool:
    """Whether so many runs of these workers fit into memory; else the row is told to be left out.

    `more` are copies of the parameters that each run has besides.
    """
    copies = runs * (workers * WORKER_HOLDS + BROKER_HOLDS + more)
    return pool.has_memory(copies * FP32 * parameters_of(size) / 1e9, row)


def compared(
    pool: ProcessPool, size: str, workers: int, repeats: int, reply: str = "fp32", **options: Any
) -> tuple[list[Round], list[Round]]:
    """Rounds of a usual run and of one with these options, in turn: both live side by side."""
    both = pool.roles("trainer", 2 * workers)
    usual, other = both[:workers], both[workers:]
    with (
        pool.training(usual, size, reply_dtype=reply) as plain,
        pool.training(other, size, reply_dtype=reply, **options) as changed,
    ):
        a_usual, another = partial(one_round, usual, plain), partial(one_round, other, changed)
        a_usual()  # memory is taken for the first time
        another()
        return in_turn(a_usual, another, repeats)


def configurations(
    *,
    sizes: Sizes = "125M",
    workers: Workers = "2",
    replies: ReplyDtypes = "fp32",
    repeats: Repeats = 5,
) -> Parts:
    """Whole synchronous rounds with real workers: time, bytes, phases, CPU, memory.

    A part for each configuration, and one with keys for each size.
    """
    counts, dtypes = whole_numbers(workers), words(replies)
    with_keys: Parts = {
        f"{WITH_KEYS}, {row_of(size, counts[0], dtypes[0])}": partial(
            round_with_keys, size=size, workers=counts[0], reply=dtypes[0], repeats=repeats
        )
        for size in words(sizes)
    }
    plain: Parts = {
        f"{WHOLE_ROUND}, {row_of(size, count, reply)}": partial(
            whole_round, size=size, workers=count, reply=reply, repeats=repeats
        )
        for size in words(sizes)
        for count in counts
        for reply in dtypes
    }
    return plain | with_keys


def whole_round(
    pool: ProcessPool, *, size: str, workers: int, reply: str, repeats: int
) -> list[Figure]:
    """One configuration."""
    parameters, row = parameters_of(size), row_of(size, workers, reply)
    if not has_room(pool, f"{WHOLE_ROUND}, {row}", size, workers):
        return []
    trainers = pool.roles("trainer", workers)
    with pool.training(trainers, size, reply_dtype=reply) as broker:
        one_round(trainers, broker)  # memory is taken for the first time
        broker.forget_turns()
        limits, rounds = in_turn(pool.raw, lambda: one_round(trainers, broker), repeats)
        turn = broker.longest_turn_ms()
        beyond = broker.beyond_state(parameters)
        held = [each["beyond"] / (FP32 * parameters) for each in ask_all(trainers, "memory")]
        sampled = []
        for _ in range(SAMPLED):
            ask_all(trainers, "drift")
            sampled.append(ask_all(trainers, "round", sampled=True))
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
        *_phases(row, sampled),
    ]


def round_with_keys(
    pool: ProcessPool, *, size: str, workers: int, reply: str, repeats: int
) -> list[Figure]:
    """A round with a broker that asks for keys, so all of it is encrypted, against one without.

    Two runs live side by side, and make rounds in turn.
    """
    row = row_of(size, workers, reply)
    if not has_room(pool, f"{WITH_KEYS}, {row}", size, workers, runs=2):
        return []
    folder = pool.make_keys(pool.roles("trainer", 2 * workers)[workers:])
    try:
        limits, rounds = compared(pool, size, workers, repeats, reply, keys=folder)
    finally:
        shutil.rmtree(folder)
    of_it = partial(figure, WITH_KEYS, row)
    seconds, with_keys = ([each.seconds for each in of] for of in (limits, rounds))
    cpu, cpu_with_keys = (
        [each.cpu / (each.up + each.down) for each in of] for of in (limits, rounds)
    )
    return [
        of_it("without keys", seconds, "s"),
        of_it("with keys", with_keys, "s"),
        of_it("ratio", against(with_keys, seconds), "x"),
        of_it("CPU without", cpu, "s/GB"),
        of_it("CPU with", cpu_with_keys, "s/GB"),
        of_it("CPU ratio", against(cpu_with_keys, cpu), "x"),
    ]


def same_host(
    pool: ProcessPool,
    *,
    size: Size = "50M",
    workers: Annotated[int, typer.Option(min=1)] = 2,
    repeats: Repeats = 7,
) -> list[Figure]:
    """Rounds through the broker's socket file, against TCP over loopback, in turn."""
    if not has_room(pool, SAME_HOST, size, workers, runs=2):
        return []
    limits, rounds = compared(pool, size, workers, repeats, ipc=True)
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


def _phases(row: str, sampled: Sequence[Sequence[dict[str, Any]]]) -> list[Figure]:
    """Of the worker that was done last in each round; and how soon the first chunk came back."""
    found: dict[str, list[float]] = defaultdict(list)
    for workers in sampled:
        if all(each["phases"] for each in workers):
            last = max(workers, key=lambda each: float(each["ended"]))
            start = max(each["began"] for each in workers)
            first = min(each["phases"]["first_down"] for each in workers)
            for name in PHASES:
                found[name].append(1e3 * last["phases"][name])
            found["first chunk back"].append(1e3 * max(0.0, first - start))
    return [figure(PHASES_OF_ROUNDS, row, name, each, "ms") for name, each in found.items()]


def growth(figures: Sequence[Figure]) -> list[Figure]:
    """Slopes of straight lines: memory over numbers of workers, time over numbers of parameters."""
    lines: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for each in figures:
        if (each.part, each.name) == (COST_PART, "broker beyond state"):
            size, workers, reply = each.of.split(", ")
            lines[OVER_WORKERS, f"{size}, {reply}"].append((int(workers.split()[0]), each.median))
        elif (each.part, each.name) == (WHOLE_ROUND, "seconds"):
            size, row = each.of.split(", ", maxsplit=1)
            lines[OVER_PARAMETERS, row].append((parameters_of(size) / 1e8, each.median))
    told = {
        OVER_WORKERS: ("a worker", "MB", "broker growth"),
        OVER_PARAMETERS: ("100M parameters", "s", None),
    }
    return [
        figure(part, row, told[part][0], line, told[part][1], target=told[part][2])
        for (part, row), points in sorted(lines.items(), key=lambda each: each[0][0])
        if (line := slope(points)) is not None
    ]


def checkpoint(
    pool: ProcessPool,
    *,
    size: Size = "50M",
    workers: Annotated[int, typer.Option(min=1, help="Of each of the two runs.")] = 2,
    repeats: Repeats = 3,
) -> list[Figure]:
    """A round while a checkpoint is written, against one without.

    Two runs live side by side, one with `--save-dir` and one without, and make rounds in turn. A round
    of the first is measured right behind another, whose checkpoint is being written then; before the
    other run's turn it is waited for.
    """
    both = pool.roles("trainer", 2 * workers)
    without, saving = both[:workers], both[workers:]
    folder = pool.folder / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    with (
        pool.training(without, size) as plain,
        pool.training(saving, size, save_dir=folder, keep=1) as saver,
    ):
        one_round(without, plain)
        one_round(saving, saver)
        saver.wait_for(_is_saved)
        saver.forget_turns()

        def round_during_a_save() -> float:
            one_round(saving, saver)  # its checkpoint is written during the next
            seconds = one_round(saving, saver).seconds
            saver.wait_for(_is_saved)
            return seconds

        limits, rounds = in_turn(
            lambda: one_round(without, plain).seconds, round_during_a_save, repeats
        )
        turn = saver.longest_turn_ms()
    shutil.rmtree(folder, ignore_errors=True)
    of_it = partial(figure, CHECKPOINT, row_of(size, workers))
    return [
        of_it("--no-save", limits, "s"),
        of_it("while saving", rounds, "s"),
        of_it("ratio", against(rounds, limits), "x"),
        of_it("longest turn", turn, "ms", target="turn"),
    ]


def _is_saved(snapshot: Snapshot) -> bool:
    """Whether the newest checkpoint is that of the round which is open now."""
    saved = snapshot.raw.get("checkpoint")
    number = None if snapshot.round is None else snapshot.round.number
    return isinstance(saved, dict) and saved.get("round") == number


GROUPS = "workers of several processes"
WORKERS_OF_GROUPS, PROCESSES = 2, 2


def groups(pool: ProcessPool, *, size: Size = "125M", repeats: Repeats = 5) -> list[Figure]:
    """Rounds of 2 workers of 2 processes each, against 2 workers of one: time and memory."""
    parameters, row = parameters_of(size), f"{row_of(size, WORKERS_OF_GROUPS)} x {PROCESSES}"
    if not has_room(pool, f"{GROUPS}, {row}", size, WORKERS_OF_GROUPS, runs=2, more=PROCESSES):
        return []
    trainers = pool.roles("trainer", WORKERS_OF_GROUPS + WORKERS_OF_GROUPS * PROCESSES)
    plain, several = trainers[:WORKERS_OF_GROUPS], trainers[WORKERS_OF_GROUPS:]
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
    with pool.broker(workers=WORKERS_OF_GROUPS, sync_every=1) as broker:
        for worker in range(WORKERS_OF_GROUPS):
            ranks = trainers[worker * PROCESSES : (worker + 1) * PROCESSES]
            port = machine.free_port()
            for rank, each in enumerate(ranks):
                each.tell("meet", port=port, rank=rank, count=len(ranks))
        for each in trainers:
            each.hear()
        ask_all(trainers, "build", size=size)
        ask_all(trainers, "join", address=broker.address, together=True)
        yield broker
        ask_all(trainers, "leave")
