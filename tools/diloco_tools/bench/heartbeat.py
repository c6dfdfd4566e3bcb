"""How soon a heartbeat is answered while a round goes on.

One more member of the run does nothing else: it is done with its own push before the others begin
theirs, and then sends a heartbeat every few milliseconds on its control connection. What the
system's scheduler has to do with it shows in a byte that goes over raw TCP to another process and back
at the same time: with more processes than cores, everybody waits for a core now and then.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from diloco_tools.bench.figures import Figure, figure
from diloco_tools.bench.raw import Ends
from diloco_tools.bench.rounds import join
from diloco_tools.bench.spread import percentile
from diloco_tools.bench.stage import ask_all

if TYPE_CHECKING:
    from diloco_tools.bench.stage import Actor, Stage

PART = "heartbeat"
INTERVAL_S = 0.004
IDLE_S = 1.0


def measure(stage: Stage, *, size: str, workers: int, rounds: int) -> list[Figure]:
    """p50, p99 and the longest over all heartbeats of some rounds."""
    trainers, (heart,) = stage.trainers(workers), stage.stand_ins(1)
    pinger, echo = stage.actor("raw", "pinger"), stage.actor("raw", "echo")
    Ends(pinger, echo).connect()
    with stage.broker("--workers", str(workers + 1), "--sync-every", "1") as broker:
        ask_all(trainers, "build", size=size)
        join(trainers, broker.address)
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
    stage.dismiss("pinger", "echo")
    row = f"during a round of {size}, {workers} workers"
    return [
        *_of("to an idle broker", idle, None),
        *_of(row, busy, "heartbeat" if (size, workers) == ("125M", 4) else None),
        *_of("a byte over raw TCP and back meanwhile", pings, None),
    ]


def _milliseconds(actor: Actor) -> list[float]:
    """End the heartbeats or pings: whatever it is asked next does."""
    actor.tell("rest")
    found = [1e3 * seconds for seconds in actor.hear()["seconds"]]
    actor.hear()
    return found


def _of(row: str, found: list[float], target: str | None) -> list[Figure]:
    note = f"{len(found)} heartbeats"
    return [
        figure(PART, row, "p50", percentile(found, 0.5), "ms", note=note),
        figure(PART, row, "p99", percentile(found, 0.99), "ms", target, note),
        figure(PART, row, "max", max(found), "ms", note=note),
    ]
