"""Transport with fold: a real broker takes pushes in and adds them up, without a step of the optimizer.

One worker more belongs to the run and begins its push last, so the round stays open while the
others' chunks are measured: received, checked, decoded, added to the accumulator, acknowledged.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.report.figures import TRANSPORT_WITH_FOLD, Figure, figure
from diloco_tools.bench.report.ratios import against, in_turn
from diloco_tools.bench.role_process import ask_all, join_fake_workers
from diloco_tools.bench.sizes import parameters_of

PART = TRANSPORT_WITH_FOLD


def measure(pool: ProcessPool, *, size: str, pushers: Sequence[int], repeats: int) -> list[Figure]:
    """For each number of pushers at a time."""
    return [each for count in pushers for each in _one(pool, size, count, repeats)]


def _one(pool: ProcessPool, size: str, count: int, repeats: int) -> list[Figure]:
    parameters = parameters_of(size)
    gigabytes = count * 2 * parameters / 1e9  # bf16
    everybody = pool.fake_workers(count + 1)
    with pool.broker("--workers", str(count + 1), "--stall-timeout", "0") as broker:
        join_fake_workers(everybody, broker.address, parameters)
        *measured, last = everybody

        def push() -> tuple[float, float]:
            cpu = broker.cpu_seconds
            found = ask_all(measured, "push", pull=False)
            used = broker.cpu_seconds - cpu
            last.ask("push", pull=False)
            seconds = max(each["up"] for each in found) - min(each["began"] for each in found)
            return gigabytes / seconds, used / gigabytes

        push()  # momentum and accumulator take their memory for the first time
        limits, found = in_turn(pool.raw.measure, push, repeats)
        ask_all(everybody, "leave")
    speeds = [speed for speed, _ in found]
    of_it = partial(figure, PART, f"{size}, {count} at a time")
    cpu = against([used for _, used in found], [each.receive_cpu for each in limits])
    shares = against(speeds, [each.speed for each in limits])
    return [
        of_it("speed", speeds, "GB/s"),
        of_it("/ raw", shares, "x", target="fold"),
        of_it("broker CPU / raw receive", cpu, "x"),
    ]
