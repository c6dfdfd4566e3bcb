"""The whole synchronous round: from the last push's start until all have the parameters in the model.

Workers are processes with a GPT-shaped model and the real hook. They start each round together, so
the last push starts when all do. Counted are the bytes on both of a worker's connections, headers
included. And what a checkpoint that is being written costs such a round.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from diloco_protocol.feed import Snapshot
from diloco_tools.bench import machine
from diloco_tools.bench.options import Repeats, Size
from diloco_tools.bench.process_pool import (
    BrokerProcess,
    ProcessPool,
    RawSample,
    RoleProcess,
    ask_all,
    join_trainers,
)
from diloco_tools.bench.report.arithmetic import (
    PHASES,
    Moments,
    against,
    around,
    in_turn,
    phases,
    slope,
)
from diloco_tools.bench.report.figures import PHASES_OF_ROUNDS, WHOLE_ROUND, Figure, figure
from diloco_tools.bench.sizes import parameters_of

COST_PART = "what a round costs"
GROWTH_PARTS = "memory, over workers", "time, over parameters"  # slopes of straight lines
CHECKPOINT = "checkpoint"
SAVED_WITHIN_S = 60.0
# Rounds with the counters sampled, for their phases; the sampling costs a little, so they are apart.
SAMPLED = 2
FP32 = 4
# Copies of the parameters in fp32 that there must be room for, with some to spare.
WORKER_HOLDS, BROKER_HOLDS = 4, 5


@dataclass(frozen=True)
class Round:
    """One round: seconds, GB up and down of all workers, CPU seconds of the broker."""

    seconds: float
    up: float
    down: float
    cpu: float

    @property
    def speed(self) -> float:
        return (self.up + self.down) / self.seconds

    @property
    def cpu_a_gb(self) -> float:
        return self.cpu / (self.up + self.down)


def row_of(size: str, workers: int, reply: str = "") -> str:
    """The row of a configuration."""
    return f"{size}, {workers} worker{'s' if workers > 1 else ''}{reply and f', {reply}'}"


def one_round(trainers: Sequence[RoleProcess], broker: BrokerProcess) -> Round:
    """Let all workers make a boundary at the same time.

    It lasts from the start of the last push until the last worker has the parameters in its model.
    """
    ask_all(trainers, "drift")
    cpu = broker.cpu_seconds
    found = ask_all(trainers, "round")
    return Round(
        max(each["ended"] for each in found) - max(each["began"] for each in found),
        sum(each["bytes_up"] for each in found) / 1e9,
        sum(each["bytes_down"] for each in found) / 1e9,
        broker.cpu_seconds - cpu,
    )


def whole_round(
    pool: ProcessPool, *, size: str, workers: int, reply: str, repeats: int
) -> list[Figure]:
    """One configuration."""
    parameters, row = parameters_of(size), row_of(size, workers, reply)
    needed = FP32 * parameters * (workers * WORKER_HOLDS + BROKER_HOLDS)
    if machine.available_bytes() < needed:
        free = machine.available_bytes() / 1e9
        pool.skipped.append(
            f"{WHOLE_ROUND}, {row}: left out, it needs {needed / 1e9:.1f} GB of memory and "
            f"{free:.1f} are free"
        )
        return []
    trainers = pool.trainers(workers)
    options = ("--workers", str(workers), "--sync-every", "1", "--reply-dtype", reply)
    for trainer in trainers:
        trainer.tell("build", size=size)  # while the broker starts
    with pool.broker(*options) as broker:
        for trainer in trainers:
            trainer.hear()
        join_trainers(trainers, broker.address)
        one_round(trainers, broker)  # memory is taken for the first time
        broker.forget_turns()
        limits, rounds = in_turn(pool.raw, lambda: one_round(trainers, broker), repeats)
        turn = broker.longest_turn_ms()
        beyond = broker.beyond_state(parameters) / 1e6
        held = [each["beyond"] / (FP32 * parameters) for each in ask_all(trainers, "memory")]
        sampled = []
        for _ in range(SAMPLED):
            ask_all(trainers, "drift")
            sampled.append(ask_all(trainers, "round", sampled=True))
        ask_all(trainers, "leave")
    shares = against([each.speed for each in rounds], [each.speed for each in limits])
    has_target = size == "125M" and workers in (2, 4)
    memory_target = "broker memory" if workers == 2 else None
    of_it, cost = partial(figure, WHOLE_ROUND, row), partial(figure, COST_PART, row)
    return [
        of_it("seconds", [each.seconds for each in rounds], "s"),
        of_it("in + out", [each.speed for each in rounds], "GB/s"),
        of_it("/ raw", shares, "x", target="round" if has_target else None),
        cost("broker CPU", [each.cpu_a_gb for each in rounds], "s/GB"),
        cost("broker CPU / raw", _cpu_shares(rounds, limits), "x", target="cpu"),
        cost("longest turn", turn, "ms", target="turn"),
        cost("broker beyond state", beyond, "MB", target=memory_target),
        cost("worker / fp32", held, "x", target="worker memory"),
        *_phases(row, sampled),
    ]


def _cpu_shares(rounds: Sequence[Round], limits: Sequence[RawSample]) -> list[float]:
    """What the broker used, against raw TCP for receiving and sending as much."""
    receive = around([each.receive_cpu for each in limits])
    send = around([each.send_cpu for each in limits])
    return [
        each.cpu / (each.up * receives + each.down * sends)
        for each, receives, sends in zip(rounds, receive, send, strict=True)
    ]


def _phases(row: str, sampled: Sequence[Sequence[dict[str, Any]]]) -> list[Figure]:
    """Of the worker that was done last in each round; and how soon the first chunk came back."""
    told, first = [], []
    for found in sampled:
        if any(each["moments"] is None for each in found):
            continue
        last = max(found, key=lambda each: float(each["ended"]))
        told.append(phases(Moments(**last["moments"])))
        start = max(each["began"] for each in found)
        first.append(min(each["moments"]["first_down"] for each in found) - start)
    if not told:
        return []
    figures = [
        figure(PHASES_OF_ROUNDS, row, name, [1e3 * each[name] for each in told], "ms")
        for name in PHASES
    ]
    figures.append(
        figure(PHASES_OF_ROUNDS, row, "first chunk back", [1e3 * max(0.0, s) for s in first], "ms")
    )
    return figures


def growth(figures: Sequence[Figure]) -> list[Figure]:
    """Slopes of straight lines: memory over numbers of workers, time over numbers of parameters."""
    memory: dict[str, list[tuple[float, float]]] = {}
    seconds: dict[str, list[tuple[float, float]]] = {}
    for each in figures:
        if (each.part, each.name) == (COST_PART, "broker beyond state"):
            size, workers, reply = each.of.split(", ")
            point = float(workers.split()[0]), each.median
            memory.setdefault(f"{size}, {reply}", []).append(point)
        elif (each.part, each.name) == (WHOLE_ROUND, "seconds"):
            size, row = each.of.split(", ", maxsplit=1)
            seconds.setdefault(row, []).append((parameters_of(size), each.median))
    return [
        figure(GROWTH_PARTS[0], row, "a worker", line, "MB", target="broker growth")
        for row, line in _slopes(memory)
    ] + [
        figure(GROWTH_PARTS[1], row, "100M parameters", 1e8 * line, "s")
        for row, line in _slopes(seconds)
    ]


def _slopes(lines: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[tuple[str, float]]:
    """Those of one point have none."""
    for row, line in lines.items():
        if len({x for x, _ in line}) > 1:
            yield row, slope(line)


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
    both = pool.trainers(2 * workers)
    without, saving = both[:workers], both[workers:]
    folder = pool.folder / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    common = ("--workers", str(workers), "--sync-every", "1")
    options = ("--save-dir", str(folder), "--keep", "1")
    with pool.broker(*common) as plain, pool.broker(*common, *options) as saver:
        ask_all(both, "build", size=size)
        for trainers, broker in ((without, plain), (saving, saver)):
            join_trainers(trainers, broker.address)
            one_round(trainers, broker)
        _wait_until_saved(saver)
        saver.forget_turns()
        limits, rounds = in_turn(
            lambda: one_round(without, plain).seconds,
            lambda: _round_during_a_save(saving, saver),
            repeats,
        )
        turn = saver.longest_turn_ms()
        ask_all(both, "leave")
    shutil.rmtree(folder, ignore_errors=True)
    of_it = partial(figure, CHECKPOINT, row_of(size, workers))
    return [
        of_it("--no-save", limits, "s"),
        of_it("while saving", rounds, "s"),
        of_it("ratio", against(rounds, limits), "x"),
        of_it("longest turn", turn, "ms", target="turn"),
    ]


def _round_during_a_save(trainers: Sequence[RoleProcess], broker: BrokerProcess) -> float:
    one_round(trainers, broker)  # its checkpoint is written during the next
    seconds = one_round(trainers, broker).seconds
    _wait_until_saved(broker)
    return seconds


def _wait_until_saved(broker: BrokerProcess) -> None:
    """Until the newest checkpoint is that of the round which is open now."""

    def is_saved(snapshot: Snapshot) -> bool:
        saved = snapshot.raw.get("checkpoint")
        number = None if snapshot.round is None else snapshot.round.number
        return isinstance(saved, dict) and saved.get("round") == number

    broker.wait_for(is_saved, SAVED_WITHIN_S)
