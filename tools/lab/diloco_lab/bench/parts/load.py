"""The load of the broker: heartbeats during a round, and many idle workers."""

from __future__ import annotations

import time
from functools import partial

from diloco_lab.bench.parts.rounds import one_round
from diloco_lab.bench.process_pool import Probes, ProcessPool
from diloco_lab.bench.report.figures import Figure, figure, percentile
from diloco_lab.bench.sizes import parameters_of

HEARTBEAT, IDLE = "heartbeat", "idle workers"
INTERVAL_S = 0.004  # between heartbeats, and between pings
IDLE_S = 1.0  # of heartbeats to a broker that does nothing else
IDLE_SIZE = "0.4M"
SETTLE_S = 1.5  # of idle workers, before the clock starts


def heartbeat(
    pool: ProcessPool, *, size: str = "125M", workers: int = 4, rounds: int = 3
) -> list[Figure]:
    """The answer times of heartbeats during a round.

    One more member of the run does nothing else. It joins while a round is open that does not expect it,
    and leaves before the next.
    """
    trainers, (heart,) = pool.roles("trainer", workers), pool.roles("hearts")
    probes = Probes(heart, pool.raw_ends)
    rows: dict[str, list[float]] = {"to an idle broker": []}
    busy = rows.setdefault(f"during a round of {size}, {workers} workers", [])
    pings = rows.setdefault("a byte over raw TCP and back meanwhile", [])
    with pool.training(trainers, size) as broker:
        one_round(trainers, broker)  # allocates memory
        for number in range(rounds + 1):
            heart.ask("join", address=broker.address, names=["heart"])
            probes.begin(INTERVAL_S)
            if number:
                one_round(trainers, broker)
            else:
                time.sleep(IDLE_S)
            found, raw = probes.end()
            heart.ask("leave")
            if number:
                busy += found
                pings += raw
            else:
                rows["to an idle broker"] = found
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


def idle(pool: ProcessPool, *, workers: int = 500, seconds: float = 9.0) -> list[Figure]:
    """The cost of many workers that only send heartbeats."""
    (trainer,), hearts = pool.roles("trainer"), pool.role("hearts", "idle_workers")
    shares = []
    # Round one waits for all of them, so there are only heartbeats.
    with pool.training([trainer], IDLE_SIZE, workers=workers + 1, stall_timeout=0) as broker:
        names = [f"idle-{number}" for number in range(workers)]
        hearts.ask("join", address=broker.address, names=names)
        hearts.tell("beat", interval_s=1.0)
        time.sleep(SETTLE_S)
        for _ in range(3):
            cpu, at = broker.cpu_seconds, time.monotonic()
            time.sleep(seconds / 3)
            shares.append((broker.cpu_seconds - cpu) / (time.monotonic() - at))
        hearts.tell("rest")
        found = hearts.hear()
        growth = broker.beyond_state(parameters_of(IDLE_SIZE))
        pool.dismiss("idle_workers")
    of_it = partial(figure, IDLE, f"{workers} workers, a heartbeat a second")
    note = f"{len(found['seconds'])} of {found['sent']} heartbeats answered"
    target = "idle" if workers == 500 else None
    return [
        of_it("of a core", shares, "%", target=target, note=note),
        of_it("broker memory", growth, "MB"),
    ]
