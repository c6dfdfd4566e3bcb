"""A week of a run in the simulator: 32 workers, 125 faults an hour, a broker that is restarted.

    PYTHONPATH=tests python -m simulation.week            # sync, async and streaming: a table

The figures are those of the chaos drill (`make chaos`), which has real processes and minutes. What is
coarser here than elsewhere, so that a week takes less than a minute: heartbeats and probes come every
few minutes, a version is one chunk, and H is a few long steps.
"""

import bisect
import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any
from unittest.mock import patch

from diloco_broker.core.members import liveness
from diloco_worker.session.connection import SILENT_BEATS
from kit.core_harness import a_config
from simulation.network import Weather
from simulation.referee import MadeVersion
from simulation.simulator import Scenario, Simulation, Troubles
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


# What a week came to, by the names of `figures`; pairs are mean or median, and most.
Figures = dict[str, Any]


@contextmanager
def coarse() -> Iterator[None]:
    """For a week: few probes, and no search for garbage among what is all still needed."""
    gc.disable()
    try:
        with patch.object(liveness, "PROBE_AFTER_S", PROBE_S):
            yield
    finally:
        gc.enable()


def simulate(mode: str, seed: int = 1, days: float = 7.0) -> Figures:
    """Simulate it; raises Violation when a promise is broken."""
    began = time.process_time()
    with coarse():
        run = Simulation(a_week(mode, days), seed).run()
    return {"mode": mode, **figures(run), "cpu_s": time.process_time() - began}


def figures(run: Simulation) -> Figures:
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
    counters = [version.counter for version in run.referee.tensors.versions.values()]
    return {
        "faults": Counter(fault.kind for fault in strikes),
        "rounds": sum(counters),  # without those that a crash took back
        "pushes": run.counted(),
        # Inner steps inside the final versions, of all that were trained; a step counts for each
        # fragment as its share of them.
        "useful": sum(applied.values()) / sum(trained.values()),
        # The same for workers that were never killed, up to the push that was open.
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
        "to_next_round_s": (statistics.median(waits), max(waits)),  # from a fault
        "restarts": run.referee.incarnations.number - 1,
        "adopted": run.referee.incarnations.adoptions,
        # Pushes that had been counted in a version that no broker could bring back.
        "taken_back": sum(record.is_lost for record in run.referee.records.values()),
        "events": run.world.events,
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


ROWS = {
    "": "{mode}",
    "faults": "{all_faults}",
    "rounds": "{rounds}",
    "pushes counted": "{pushes}",
    "  taken back by a crash": "{taken_back}",
    "restarts of the broker": "{restarts}",
    "  fragments adopted": "{adopted}",
    "useful work, all": "{useful:.4f}",
    "useful work, never killed": "{useful_unharmed:.4f}",
    f"steps lost a kill (H = {H})": "{lost_a_kill[0]:.2f}",
    "  most": "{lost_a_kill[1]:g}",
    "  most behind a stop": "{lost_behind_stop:.2f}",
    "  kills that lost more than H": "{lost_more}",
    "alive and averaged": "{averaged:.4f}",
    "fault to next round, median s": "{to_next_round_s[0]:.0f}",
    "  longest": "{to_next_round_s[1]:.0f}",
    "events": "{events}",
    "CPU seconds": "{cpu_s:.1f}",
}


def table(found: Sequence[Figures]) -> str:
    """The figures side by side."""
    lines = []
    for title, how in ROWS.items():
        values = [how.format(all_faults=each["faults"].total(), **each) for each in found]
        lines.append((title, values))
        if title == "faults":
            kinds = sorted({kind for each in found for kind in each["faults"]})
            lines += [
                (f"  {kind}", [str(each["faults"][kind]) for each in found]) for kind in kinds
            ]
    return "\n".join(f"{name:32}" + "".join(f"{v:>12}" for v in values) for name, values in lines)


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(MODES)
    print(table([simulate(mode) for mode in chosen]))
