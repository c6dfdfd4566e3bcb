"""Asynchronous mode: pushes a second, each with its outer step and the new version for its worker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.report.figures import Figure, figure
from diloco_tools.bench.report.ratios import against, in_turn
from diloco_tools.bench.role_process import ask_all, join_trainers

PART = "asynchronous"


def measure(
    pool: ProcessPool, *, size: str, workers: Sequence[int], seconds: float, repeats: int
) -> list[Figure]:
    """For each number of workers; nobody waits for the others."""
    return [each for count in workers for each in _one(pool, size, count, seconds, repeats)]


def _one(pool: ProcessPool, size: str, count: int, seconds: float, repeats: int) -> list[Figure]:
    trainers = pool.trainers(count)
    with pool.broker("--mode", "async", "--workers", str(count), "--sync-every", "1") as broker:
        ask_all(trainers, "build", size=size)
        join_trainers(trainers, broker.address)
        ask_all(trainers, "round")
        broker.forget_turns()

        def run() -> tuple[float, float]:
            found = ask_all(trainers, "rounds_for", seconds=seconds / repeats)
            took = max(each["ended"] for each in found) - min(each["began"] for each in found)
            moved = sum(each["bytes_up"] + each["bytes_down"] for each in found) / 1e9
            return sum(each["rounds"] for each in found) / took, moved / took

        limits, found = in_turn(pool.raw.measure, run, repeats)
        turn = broker.longest_turn_ms()
        ask_all(trainers, "leave")
    of_it = partial(figure, PART, f"{size}, {count} workers")
    shares = against([speed for _, speed in found], [each.speed for each in limits])
    return [
        of_it("pushes", [pushes for pushes, _ in found], "/s"),
        of_it("in + out", [speed for _, speed in found], "GB/s"),
        of_it("/ raw", shares, "x"),
        of_it("longest turn", turn, "ms", target="turn"),
    ]
