"""A week of a run in the simulator: 32 workers, 125 faults an hour, a broker that is restarted.

The chaos drill (`make chaos`) measures the same with real processes and in minutes. To make a week take
less than a minute, heartbeats and probes come every few minutes, a version is one chunk, and H is a few
long steps.
"""

import bisect
import gc
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any
from unittest.mock import patch

from diloco_broker.core.members import liveness
from diloco_worker.session.connection import SILENT_BEATS
from kit.core_harness import a_config
from simulation.network import Weather
from simulation.referee import MadeVersion
from simulation.simulator import Scenario, Simulation
from simulation.troubles import Troubles
from simulation.worker import Worker

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
# A connection that never breaks counts as broken after this silence.
SILENCE_S = SILENT_BEATS * HEARTBEAT_S


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


def simulate(mode: str, days: float) -> dict[str, Any]:
    """Simulate it; returns its figures, or raises Violation when a promise is broken."""
    with coarse():
        return figures(Simulation(a_week(mode, days), seed=1).run())


def figures(run: Simulation) -> dict[str, Any]:
    strikes = run.accidents.faults
    killed = {fault.victim for fault in strikes if fault.kind == "kill"}
    applied, flying = steps_by_process(run)
    pieces = run.scenario.config.num_fragments
    trained = {p.name: pieces * (p.training.step - p.habits.first_step) for p in run.processes}
    unharmed = [p for p in run.processes if p.name not in killed]
    closed = sum(up_to_open_push(p, flying) for p in unharmed)
    lost = {name: (trained[name] - applied.get(name, 0)) / pieces for name in killed}
    behind = {name: SILENCE_S * speed for name, speed in behind_a_stop(run).items() if name in lost}
    ends = [made.ended_at for made in run.referee.rounds]
    nexts = [(fault.at, bisect.bisect(ends, fault.at)) for fault in strikes]
    waits = [ends[after] - at for at, after in nexts if after < len(ends)]
    return {
        "faults": Counter(fault.kind for fault in strikes),
        # Inner steps inside the final versions, of all that workers which were never killed trained
        # up to the push that was open; a step counts for each fragment as its share of them.
        "useful_unharmed": sum(applied.get(p.name, 0) for p in unharmed) / closed,
        # With each killed process: mean of all, most of those not `behind_a_stop`.
        "lost_a_kill": (
            statistics.mean(lost.values()),
            max(lost[name] for name in lost.keys() - behind.keys()),
        ),
        # Most that one of the others lost, beyond what it trains in `SILENCE_S`.
        "lost_behind_stop": max(
            (lost[name] - alone for name, alone in behind.items()), default=0.0
        ),
        # Their push was on its way, or waited for its round, and they trained on.
        "lost_more": sum(steps > H for steps in lost.values()),
        "averaged": share_averaged(run),
        "to_next_round_s": max(waits),  # from a fault
    }


def behind_a_stop(run: Simulation) -> dict[str, float]:
    """Speeds of the processes that ended soon after their broker was stopped, to be started again.

    A worker that is told "the broker restarts" trains on and waits for nothing until it is welcome.
    Where its connection never shows that the broker is gone, that is after `SILENCE_S`; what it has in
    flight then waits for its round, a cycle at most.
    """
    window = SILENCE_S + run.scenario.cycle_s
    stops = [fault.at for fault in run.accidents.faults if fault.kind == "stop"]
    return {
        each.name: each.habits.speed
        for each in run.processes
        if each.ended_at is not None and any(0 <= each.ended_at - at <= window for at in stops)
    }


def steps_by_process(run: Simulation) -> tuple[dict[str, int], dict[str, int]]:
    """Steps inside the final versions, and in flight at the end, summed over fragments."""
    applied: dict[str, int] = {}
    flying: dict[str, int] = {}
    fragments = run.broker.core.state.versions.fragments
    for key, record in run.referee.records.items():
        wires = fragments[record.push.fragment].wires
        if record.is_whole_in(key, wires):
            applied[record.process] = applied.get(record.process, 0) + record.push.steps
        elif record.ending is None:
            flying[record.process] = flying.get(record.process, 0) + record.push.steps
    return applied, flying


def up_to_open_push(process: Worker, flying: dict[str, int]) -> int:
    """Steps up to the last freeze of each fragment, without those still in flight; summed up."""
    return process.training.frozen_steps - flying.get(process.name, 0)


def share_averaged(run: Simulation) -> float:
    """Of the workers alive throughout a round, the share that was averaged in it.

    Without common rounds: of those alive throughout a span in which the slowest worker makes a cycle
    and its upload has its turn, the share of which a push was applied.
    """
    spans = rounds = run.referee.rounds
    if run.scenario.config.is_async:
        length = 1.25 * run.scenario.cycle_s
        names: dict[int, set[str]] = {}
        for made in rounds:
            names.setdefault(int(made.ended_at // length), set()).update(made.processes)
        spans = [
            MadeVersion(n * length, (n + 1) * length, frozenset(names[n]))
            for n in sorted(names)[:-1]
        ]
    there = averaged = 0
    for process in run.processes:
        ended_at = process.ended_at if process.ended_at is not None else run.world.now
        if process.welcome_at is None:
            continue
        first = bisect.bisect_left(spans, process.welcome_at, key=attrgetter("opened_at"))
        for _, end, names_ in spans[first:]:
            if end > ended_at:
                break
            there += 1
            averaged += process.name in names_
    return averaged / there
