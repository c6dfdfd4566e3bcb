"""What the broker can bear: heartbeats in a round, many idle workers, a billion parameters."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

import typer

from diloco_lab.bench.parts import Repeats, Size
from diloco_lab.bench.process_pool import STATE_BYTES, ProcessPool
from diloco_lab.bench.report.arithmetic import against, in_turn, percentile
from diloco_lab.bench.report.figures import Figure, figure
from diloco_lab.driver.roles import RoleProcess, ask_all

HEARTBEAT, IDLE, LARGEST = "heartbeat", "idle workers", "largest model"
INTERVAL_S = 0.004  # between heartbeats, and between pings
IDLE_S = 1.0  # of heartbeats to a broker that does nothing else
IDLE_PARAMETERS = 1000
SETTLE_S = 1.5  # of idle workers, before the clock starts
LARGEST_WORKERS = 2
SPARE_BYTES = 2e9  # that should be left to everything else


def heartbeat(
    pool: ProcessPool,
    *,
    size: Size = "125M",
    workers: Annotated[int, typer.Option(min=1)] = 4,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
) -> list[Figure]:
    """How soon heartbeats are answered during a round.

    One more member of the run does nothing else: it is done with its own push before the others begin
    theirs, and then sends a heartbeat every few milliseconds on its control connection. What the
    system's scheduler has to do with it shows in a byte that goes over raw TCP to another process and
    back at the same time: with more processes than cores, everybody waits for a core now and then.
    """
    trainers, (heart,) = pool.roles("trainer", workers), pool.roles("fake-worker")
    pinger, echo = pool.raw_ends
    busy: list[float] = []
    pings: list[float] = []
    with pool.training(trainers, size, workers=workers + 1) as broker:
        heart.ask("join", address=broker.address, parameters=None)
        heart.ask("learn_version")
        heart.tell("beat", interval_s=INTERVAL_S)
        time.sleep(IDLE_S)
        idle = _milliseconds(heart)
        for number in range(rounds + 1):
            ask_all(trainers, "drift")
            heart.ask("push", pull=False)
            heart.tell("beat", interval_s=INTERVAL_S)
            echo.tell("echo")
            pinger.tell("ping", interval_s=INTERVAL_S)
            ask_all(trainers, "round")
            found, raw = _milliseconds(heart), _milliseconds(pinger)
            echo.hear()
            if number:  # the first round takes memory for the first time
                busy += found
                pings += raw
        heart.ask("leave")
    rows = {
        "to an idle broker": idle,
        f"during a round of {size}, {workers} workers": busy,
        "a byte over raw TCP and back meanwhile": pings,
    }
    figures = []
    for row, found in rows.items():
        of_it = partial(figure, HEARTBEAT, row, note=f"{len(found)} heartbeats")
        has_target = found is busy and (size, workers) == ("125M", 4)
        target = "heartbeat" if has_target else None
        figures += [
            of_it("p50", percentile(found, 0.5), "ms"),
            of_it("p99", percentile(found, 0.99), "ms", target=target),
            of_it("max", max(found), "ms"),
        ]
    return figures


def _milliseconds(role: RoleProcess) -> list[float]:
    """How long the heartbeats or pings took that end now."""
    role.tell("rest")
    found = role.hear()
    if found["answered"] != found["sent"]:
        raise role.failure("got an answer too few or too many to its heartbeats")
    return [1e3 * seconds for seconds in found["seconds"]]


def idle(
    pool: ProcessPool,
    *,
    workers: Annotated[int, typer.Option(min=1, max=4000)] = 500,
    seconds: Annotated[float, typer.Option(min=0.3)] = 9.0,
) -> list[Figure]:
    """What many workers cost that only send heartbeats."""
    role = pool.role("fake-worker", "idle_workers")
    shares = []
    # Round one waits for one worker more, so nothing but heartbeats goes on.
    with pool.broker(workers=workers + 1, stall_timeout=0) as broker:
        role.ask("join", address=broker.address, parameters=IDLE_PARAMETERS, count=workers)
        role.ask("learn_version")
        role.tell("beat", interval_s=1.0)
        time.sleep(SETTLE_S)
        for _ in range(3):
            cpu, at = broker.cpu_seconds, time.monotonic()
            time.sleep(seconds / 3)
            shares.append((broker.cpu_seconds - cpu) / (time.monotonic() - at))
        role.tell("rest")
        found = role.hear()
        growth = broker.beyond_state(0)
    pool.dismiss("idle_workers")
    of_it = partial(figure, IDLE, f"{workers} workers, a heartbeat a second")
    note = f"{found['answered']} of {found['sent']} heartbeats answered"
    target = "idle" if workers == 500 else None
    return [
        of_it("of a core", shares, "%", target=target, note=note),
        of_it("broker memory", growth, "MB"),
    ]


def largest(
    pool: ProcessPool,
    *,
    millions: Annotated[int, typer.Option(min=1, help="Parameters, in millions.")] = 1000,
    repeats: Repeats = 2,
) -> list[Figure]:
    """A round of a billion parameters, pushed from one small buffer; needs 14 GB of memory.

    Two workers push bf16 and pull fp32. Four GB of parameters, as much of momentum and of the
    accumulator are at the broker; at its peak it should have little more.
    """
    parameters = millions * 1_000_000
    row = f"{parameters / 1e9:.3g}G parameters, {LARGEST_WORKERS} stand-ins"
    pool.dismiss("trainer-")  # they have memory that is needed here
    if not pool.has_memory((STATE_BYTES * parameters + SPARE_BYTES) / 1e9, row):
        return []
    with pool.fake_training(LARGEST_WORKERS, parameters) as (broker, workers):

        def a_round() -> float:
            found = ask_all(workers, "push", pull=True)
            began = max(each["began"] for each in found)
            return float(max(each["ended"] for each in found) - began)

        a_round()
        broker.forget_turns()
        limits, seconds = in_turn(lambda: pool.raw().speed, a_round, repeats)
        turn = broker.longest_turn_ms()
        beyond = broker.beyond_state(parameters)
    speeds = [LARGEST_WORKERS * (2 + 4) * parameters / 1e9 / each for each in seconds]
    of_it = partial(figure, LARGEST, row)
    return [
        of_it("seconds", seconds, "s"),
        of_it("in + out", speeds, "GB/s"),
        of_it("/ raw", against(speeds, limits), "x"),
        of_it("broker beyond state", beyond, "MB", target="broker memory"),
        of_it("longest turn", turn, "ms", target="turn"),
    ]
