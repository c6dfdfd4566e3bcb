"""A round of a model with a billion parameters: workers without a model stream it from one small buffer.

Four GB of parameters, as much of momentum and of the accumulator are at the broker; at its peak it
should have little more. The same code serves any number of parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_tools.bench.figures import Figure, figure
from diloco_tools.bench.machine import available_bytes
from diloco_tools.bench.spread import against, in_turn
from diloco_tools.bench.stage import STATE_BYTES, ask_all

if TYPE_CHECKING:
    from diloco_tools.bench.stage import Stage

PART = "largest model"
WORKERS = 2
SPARE_BYTES = 2e9  # that should be left to everything else


def measure(stage: Stage, *, parameters: int, rounds: int) -> list[Figure]:
    """Two workers push bf16 and pull fp32."""
    row = f"{parameters / 1e9:.3g}G parameters, {WORKERS} stand-ins"
    needed = STATE_BYTES * parameters + SPARE_BYTES
    if available_bytes() < needed:
        stage.skipped.append(
            f"{row}: left out, it needs {needed / 1e9:.0f} GB of memory and "
            f"{available_bytes() / 1e9:.0f} GB are there"
        )
        return []
    workers = stage.stand_ins(WORKERS)
    gigabytes = WORKERS * (2 + 4) * parameters / 1e9
    with stage.broker("--workers", str(WORKERS), "--stall-timeout", "0") as broker:
        for i, actor in enumerate(workers):
            actor.ask("join", address=broker.address, worker_id=f"b{i}", parameters=parameters)
        ask_all(workers, "learn_version")

        def a_round() -> float:
            found = ask_all(workers, "push", pull=True)
            began = max(each["began"] for each in found)
            return float(max(each["ended"] for each in found) - began)

        a_round()
        broker.forget_turns()
        limits, seconds = in_turn(lambda: stage.raw.measure().speed, a_round, rounds)
        turn = broker.longest_turn_ms()
        beyond = broker.beyond_state(parameters) / 1e6
        ask_all(workers, "leave")
    speeds = [gigabytes / each for each in seconds]
    return [
        figure(PART, row, "seconds", seconds, "s"),
        figure(PART, row, "in + out", speeds, "GB/s"),
        figure(PART, row, "/ raw", against(speeds, limits), "x"),
        figure(PART, row, "broker beyond state", beyond, "MB", "broker memory"),
        figure(PART, row, "longest turn", turn, "ms", "turn"),
    ]
