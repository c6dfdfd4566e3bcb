"""A week of a run in sites: 32 workers behind four relays and beside them, 125 faults an hour.

    PYTHONPATH=tests python -m simulation.site_week            # sync, fragments and async: a table

The same faults as in `simulation.week`, for a tree: processes are killed at any moment, workers, relays
and the hub; connections break, lines of sites are down for minutes, workers move between brokers with
what they have in flight. As coarse as that week, so that it takes no longer.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from simulation.network import Weather
from simulation.sites import Pace
from simulation.tree import Faults, Tree
from simulation.week import DAY, FAULTS_AN_HOUR, coarse

FAULTS = Faults(
    workers=48.0,
    relays=12.0,
    connections=41.8,
    moves=15.0,
    cuts=8.0,
    hubs=0.2,
    lost_disks=0.2,
)
CYCLE_S = 900.0  # of training, with what it takes to send
SITES = {"north": 8, "south": 7, "middle": 6, "deep": 7, "hub": 4}
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "fragments": {"num_fragments": 2},
    "async": {"mode": "async", "staging_slots": 4},
}
PACE = Pace(
    tick=15.0,
    work=0.01,
    save=5.0,
    watch=(5.0, 20.0),
    thoroughness=20,
    heartbeat=400.0,
    look=30.0,
    cycle=(0.85 * CYCLE_S, CYCLE_S),
    slow=(0.9, 1.0, 1.1),
    back=180.0,
    away=(10.0, 60.0, 600.0),
)
# A hub that begins anew waits so long for those who may hold more.
RECOVER_WAIT_S = 120.0


class SiteWeek(Tree):
    """See the head of this module."""

    def __init__(self, mode: str, seed: int = 1) -> None:
        usual: dict[str, Any] = {
            "disconnect_grace": 60.0,
            "heartbeat_timeout": 1200.0,
            "recover_wait": RECOVER_WAIT_S,
            "grace": 60.0 if mode == "async" else 0.0,
        }
        super().__init__(
            seed,
            FAULTS,
            pace=PACE,
            weather=Weather(stall=0.0, chunk_s=(0.2, 1.0)),
            places=[place for place, workers in SITES.items() for _ in range(workers)],
            **usual,
            **MODES[mode],
        )


def simulate(mode: str, seed: int = 1, days: float = 7.0) -> dict[str, Any]:
    """Simulate it; raises AssertionError when a promise is broken."""
    began = time.process_time()
    with coarse():
        week = SiteWeek(mode, seed)
        week.run(days * DAY)
    hours = days * 24.0
    lives = sum(host.lives for host in week.hosts.values() if hasattr(host, "lives"))
    return {
        "mode": mode,
        "faults an hour": week.strikes / hours,
        "versions": week.versions,
        "pushes counted": len(week.told),
        "of those that fit in": len(week.told) / _most(week, days * DAY),
        "refused": len(week.refused),
        "refused as": ", ".join(sorted({code for _, code in week.refused})),
        "longest without a version, s": week.longest,
        "lives of sites at the end": lives,
        "events": week.world.events,
        "CPU seconds": time.process_time() - began,
    }


def _most(week: Tree, seconds: float) -> float:
    """Pushes that all workers would have made with nothing to disturb them."""
    pieces = week.config.num_fragments
    return len(week.server_of) * pieces * seconds / (sum(PACE.cycle) / 2)


def table(found: list[dict[str, Any]]) -> str:
    lines = []
    for name in found[0]:
        values = (each[name] for each in found)
        shown = (f"{v:.2f}" if isinstance(v, float) else str(v) for v in values)
        lines.append(f"{name:32}" + "".join(f"{each:>14}" for each in shown))
    return "\n".join(lines)


if __name__ == "__main__":
    assert abs(sum((48.0, 12.0, 41.8, 15.0, 8.0, 0.2)) - FAULTS_AN_HOUR) < 0.1
    print(table([simulate(mode) for mode in sys.argv[1:] or MODES]))
