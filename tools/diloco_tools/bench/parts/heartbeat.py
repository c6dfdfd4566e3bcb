"""How soon a heartbeat is answered while a round goes on.

One more member of the run does nothing else: it is done with its own push before the others begin
theirs, and then sends a heartbeat every few milliseconds on its control connection. What the
system's scheduler has to do with it shows in a byte that goes over raw TCP to another process and back
at the same time: with more processes than cores, everybody waits for a core now and then.
"""

from __future__ import annotations

import time
from functools import partial

from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.raw_tcp import Ends
from diloco_tools.bench.report.figures import Figure, figure
from diloco_tools.bench.report.ratios import percentile
from diloco_tools.bench.role_process import RoleProcess, ask_all, join_trainers

PART = "heartbeat"
INTERVAL_S = 0.004
IDLE_S = 1.0


def measure(pool: ProcessPool, *, size: str, workers: int, rounds: int) -> list[Figure]:
    """p50, p99 and the longest over all heartbeats of some rounds."""
    trainers, (heart,) = pool.trainers(workers), pool.fake_workers(1)
    pinger, echo = pool.role("raw", "pinger"), pool.role("raw", "echo")
    Ends(pinger, echo).connect()
    with pool.broker("--workers", str(workers + 1), "--sync-every", "1") as broker:
        ask_all(trainers, "build", size=size)
        join_trainers(trainers, broker.address)
        heart.ask("join", address=broker.address, worker_id="heart", parameters=None)
        heart.ask("learn_version")
        heart.tell("beat", interval_s=INTERVAL_S)
        time.sleep(IDLE_S)
        idle = _milliseconds(heart)
        busy: list[float] = []
        pings: list[float] = []
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
        ask_all(trainers, "leave")
        heart.ask("leave")
    pool.dismiss("pinger", "echo")
    row = f"during a round of {size}, {workers} workers"
    return [
        *_of("to an idle broker", idle, None),
        *_of(row, busy, "heartbeat" if (size, workers) == ("125M", 4) else None),
        *_of("a byte over raw TCP and back meanwhile", pings, None),
    ]


def _milliseconds(role: RoleProcess) -> list[float]:
    """End the heartbeats or pings: whatever it is asked next does."""
    role.tell("rest")
    found = [1e3 * seconds for seconds in role.hear()["seconds"]]
    role.hear()
    return found


def _of(row: str, found: list[float], target: str | None) -> list[Figure]:
    note = f"{len(found)} heartbeats"
    of_it = partial(figure, PART, row, note=note)
    return [
        of_it("p50", percentile(found, 0.5), "ms"),
        of_it("p99", percentile(found, 0.99), "ms", target=target),
        of_it("max", max(found), "ms"),
    ]
