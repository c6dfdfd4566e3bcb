"""A week of a run in the simulator: 32 workers, 125 faults an hour, a broker that is restarted.

The chaos drill (`make chaos`) measures with real processes what faults cost. To make a week take less
than a minute, heartbeats and probes come every few minutes, a version is one chunk, and H is a few
long steps.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from diloco_broker.core.members import liveness
from kit.core_harness import a_config
from simulation.network import Weather
from simulation.simulator import Scenario
from simulation.troubles import Troubles

HOUR, DAY = 3600.0, 24 * 3600.0
WORKERS, FAULTS_AN_HOUR = 32, 125.0
MODES: dict[str, dict[str, Any]] = {
    "sync": {"min_workers": 4},
    "async": {"mode": "async", "staging_slots": 4},
    "streaming": {"min_workers": 4, "num_fragments": 2},
}
H, STEP_S = 4, 225.0  # a worker of speed 1 makes its H steps in a quarter of an hour
SPEEDS = (0.85, 1.2)
# How often the broker probes a silent worker; a second outside simulated weeks.
PROBE_S = 600.0
HEARTBEAT_S = 400.0


def troubles(days: float) -> Troubles:
    shares = {"kills": 50.0, "breaks": 40.0, "outages": 8.0, "hangs": 8.0, "freezes": 4.0}
    shares |= {"leaves": 5.0, "joins": 9.5, "restarts": 0.2, "fulls": 0.3}
    assert sum(shares.values()) == FAULTS_AN_HOUR
    return Troubles(
        seconds=days * DAY,
        **{kind: an_hour / HOUR for kind, an_hour in shares.items()},
        silent=0.001,
        returns=1.0,
        back_s=180.0,
        outage_s=60.0,
        hang_s=600.0,
        freeze_s=60.0,
        restart_s=30.0,
        full_s=1200.0,
    )


def a_week(mode: str, days: float = 7.0) -> Scenario:
    config = a_config(
        WORKERS,
        sync_every=H,
        heartbeat_timeout=1200.0,
        stall_timeout=900.0,
        save_dir="folder",
        **MODES[mode],
    )
    return Scenario(
        config,
        workers=WORKERS,
        most=WORKERS,
        chunks=1,
        steps_per_s=1 / STEP_S,
        speeds=SPEEDS,
        timeouts=(HOUR,),
        goal=1,
        troubles=troubles(days),
        weather=Weather(stall=0.0, chunk_s=(0.5, 3.0)),
        habits={"look_s": 600.0, "heartbeat_interval": HEARTBEAT_S},
        save_s=5.0,
        tick_s=10.0,
        watch_s=120.0,
        thoroughness=5000,
    )


@contextmanager
def coarse() -> Iterator[None]:
    """For a week: few probes, and no search for garbage among what is all still needed."""
    gc.disable()
    try:
        with patch.object(liveness, "PROBE_AFTER_S", PROBE_S):
            yield
    finally:
        gc.enable()
