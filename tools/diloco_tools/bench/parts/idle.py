"""What many workers cost the broker that do nothing but send a heartbeat a second."""

from __future__ import annotations

import time
from functools import partial

from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.report.figures import Figure, figure

PART = "idle workers"
SETTLE_S = 1.5  # heartbeats before the clock starts


def measure(pool: ProcessPool, *, workers: int, seconds: float) -> list[Figure]:
    """What heartbeats of workers that train cost the broker, as a share of one core."""
    of_it = partial(figure, PART, f"{workers} workers, a heartbeat a second")
    # Round one waits for one worker more, so nothing but heartbeats goes on.
    with pool.broker("--workers", str(workers + 1), "--stall-timeout", "0") as broker:
        idle = pool.role("idle_workers")
        idle.ask("join", address=broker.address, count=workers)
        idle.tell("live", seconds=SETTLE_S + seconds, interval_s=1.0)
        time.sleep(SETTLE_S)
        shares = []
        for _ in range(3):
            cpu, at = broker.cpu_seconds, time.monotonic()
            time.sleep(seconds / 3)
            shares.append((broker.cpu_seconds - cpu) / (time.monotonic() - at))
        found = idle.hear()
        growth = broker.beyond_state(0) / 1e6
    pool.dismiss("idle_workers")
    note = f"{found['answered']} of {found['sent']} heartbeats answered"
    target = "idle" if workers == 500 else None
    return [
        of_it("of a core", shares, "%", target=target, note=note),
        of_it("broker memory", growth, "MB"),
    ]
