"""The whole synchronous round: from the last push's start until all have the parameters in the model.

Workers are processes with a GPT-shaped model and the real hook. They start each round together, so
the last push starts when all do. Counted are the bytes on both of a worker's connections, headers
included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from diloco_tools.bench import machine
from diloco_tools.bench.broker_process import BrokerProcess
from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.raw_tcp import RawSample
from diloco_tools.bench.report.figures import PHASES_OF_ROUNDS, WHOLE_ROUND, Figure, figure
from diloco_tools.bench.report.phases import PHASES, Moments, phases
from diloco_tools.bench.report.ratios import against, around, in_turn, slope
from diloco_tools.bench.role_process import RoleProcess, ask_all, join_trainers
from diloco_tools.bench.sizes import parameters_of

PART = WHOLE_ROUND
COST_PART = "what a round costs"
PHASES_PART = PHASES_OF_ROUNDS
GROWTH_PARTS = "memory, over workers", "time, over parameters"  # slopes of straight lines
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


def row_of(size: str, workers: int, reply: str) -> str:
    """The row of a configuration."""
    return f"{size}, {workers} worker{'s' if workers > 1 else ''}, {reply}"


def one_round(trainers: Sequence[RoleProcess], broker: BrokerProcess) -> Round:
    """Let all workers make a boundary at the same time."""
    ask_all(trainers, "drift")
    cpu = broker.cpu_seconds
    found = ask_all(trainers, "round")
    return Round(
        seconds_of(found),
        sum(each["bytes_up"] for each in found) / 1e9,
        sum(each["bytes_down"] for each in found) / 1e9,
        broker.cpu_seconds - cpu,
    )


def seconds_of(found: Sequence[dict[str, Any]]) -> float:
    """From the start of the last push until the last worker has the parameters in its model."""
    return float(max(each["ended"] for each in found) - max(each["began"] for each in found))


def measure(
    pool: ProcessPool, *, size: str, workers: int, reply: str, repeats: int
) -> list[Figure]:
    """One configuration."""
    parameters, row = parameters_of(size), row_of(size, workers, reply)
    needed = FP32 * parameters * (workers * WORKER_HOLDS + BROKER_HOLDS)
    if machine.available_bytes() < needed:
        free = machine.available_bytes() / 1e9
        pool.skipped.append(
            f"{PART}, {row}: left out, it needs {needed / 1e9:.1f} GB of memory and {free:.1f} are free"
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
        limits, rounds = in_turn(pool.raw.measure, lambda: one_round(trainers, broker), repeats)
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
    of_it, cost = partial(figure, PART, row), partial(figure, COST_PART, row)
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
        figure(PHASES_PART, row, name, [1e3 * each[name] for each in told], "ms") for name in PHASES
    ]
    figures.append(
        figure(PHASES_PART, row, "first chunk back", [1e3 * max(0.0, s) for s in first], "ms")
    )
    return figures


def growth(figures: Sequence[Figure]) -> list[Figure]:
    """Straight lines: memory over numbers of workers, time over numbers of parameters."""
    memory = _points(figures, COST_PART, "broker beyond state")
    seconds = _points(figures, PART, "seconds")
    found = [
        figure(GROWTH_PARTS[0], f"{size}, {reply}", "a worker", line, "MB", target="broker growth")
        for size, reply, line in _slopes(memory, ("size", "reply"), "workers")
    ]
    found += [
        figure(GROWTH_PARTS[1], f"{workers}, {reply}", "100M parameters", 1e8 * line, "s")
        for workers, reply, line in _slopes(seconds, ("workers", "reply"), "parameters")
    ]
    return found


def _points(figures: Sequence[Figure], part: str, name: str) -> list[dict[str, Any]]:
    """Medians, with what they were measured on taken apart."""
    points = []
    for each in figures:
        if each.part == part and each.name == name:
            size, workers, reply = each.of.split(", ")
            known = {"size": size, "workers": workers, "reply": reply, "y": each.median}
            points.append(known | {"parameters": parameters_of(size)})
    return points


def _slopes(
    points: Sequence[dict[str, Any]], by: tuple[str, str], over: str
) -> list[tuple[str, str, float]]:
    """The slope of each line of points that have `by` in common; lines of one point are left out."""
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for point in points:
        x = float(str(point[over]).split()[0])
        lines.setdefault((point[by[0]], point[by[1]]), []).append((x, point["y"]))
    return [(*key, slope(line)) for key, line in lines.items() if len({x for x, _ in line}) > 1]
