"""A round of a model with a billion parameters: fake workers send it from one small buffer.

Four GB of parameters, as much of momentum and of the accumulator are at the broker; at its peak it
should have little more. The same code serves any number of parameters.
"""

from __future__ import annotations

from functools import partial

from diloco_tools.bench.broker_process import STATE_BYTES
from diloco_tools.bench.machine import available_bytes
from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.report.figures import Figure, figure
from diloco_tools.bench.report.ratios import against, in_turn
from diloco_tools.bench.role_process import ask_all, join_fake_workers

PART = "largest model"
WORKERS = 2
SPARE_BYTES = 2e9  # that should be left to everything else


def measure(pool: ProcessPool, *, parameters: int, repeats: int) -> list[Figure]:
    """Two workers push bf16 and pull fp32."""
    row = f"{parameters / 1e9:.3g}G parameters, {WORKERS} stand-ins"
    pool.dismiss("trainer-")  # they have memory that is needed here
    needed = STATE_BYTES * parameters + SPARE_BYTES
    if available_bytes() < needed:
        pool.skipped.append(
            f"{row}: left out, it needs {needed / 1e9:.0f} GB of memory and "
            f"{available_bytes() / 1e9:.0f} GB are there"
        )
        return []
    workers = pool.fake_workers(WORKERS)
    gigabytes = WORKERS * (2 + 4) * parameters / 1e9
    with pool.broker("--workers", str(WORKERS), "--stall-timeout", "0") as broker:
        join_fake_workers(workers, broker.address, parameters)

        def a_round() -> float:
            found = ask_all(workers, "push", pull=True)
            began = max(each["began"] for each in found)
            return float(max(each["ended"] for each in found) - began)

        a_round()
        broker.forget_turns()
        limits, seconds = in_turn(lambda: pool.raw.measure().speed, a_round, repeats)
        turn = broker.longest_turn_ms()
        beyond = broker.beyond_state(parameters) / 1e6
        ask_all(workers, "leave")
    speeds = [gigabytes / each for each in seconds]
    of_it = partial(figure, PART, row)
    return [
        of_it("seconds", seconds, "s"),
        of_it("in + out", speeds, "GB/s"),
        of_it("/ raw", against(speeds, limits), "x"),
        of_it("broker beyond state", beyond, "MB", target="broker memory"),
        of_it("longest turn", turn, "ms", target="turn"),
    ]
