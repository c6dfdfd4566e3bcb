"""Adaptive grace with stragglers: more pushes count, and no worker trains less for it."""

from dataclasses import dataclass
from typing import Any

import pytest

from kit.core_harness import a_config
from simulation.network import Weather
from simulation.simulator import Scenario, Simulation
from simulation.troubles import NO_TROUBLES

# Steps per second. The last worker is always late; the times of the others' steps vary by 20%.
SPEEDS = (4.0, 4.0, 4.0, 2.0)
SETTLES_S, MEASURED_S = 30.0, 120.0
LARGE = 10.0  # seconds: longer than the slow worker needs for the steps between two pushes


@dataclass(frozen=True)
class Found:
    goodput: float  # steps of all workers per second
    participation: float  # share of pushes that were counted


def measure(grace: float | str, **options: Any) -> Found:
    config = a_config(
        len(SPEEDS),
        quorum=1,
        late="drop",
        grace=grace,
        num_fragments=2,
        sync_every=16,
        weight_by="tokens2-per-step",
        heartbeat_timeout=12.0,
        **options,
    )
    weather = Weather(stall=0.0)
    usual: dict[str, Any] = {"workers": 0, "speeds": (1.0, 1.0), "timeouts": (600.0,), "habits": {}}
    scenario = Scenario(config, troubles=NO_TROUBLES, weather=weather, thoroughness=50, **usual)
    run = Simulation(scenario, seed=1)
    workers = [run.newcomer(speed=speed, first_step=0) for speed in SPEEDS]
    run.passes(SETTLES_S)
    before = sum(each.training.step for each in workers)
    run.passes(MEASURED_S)
    goodput = (sum(each.training.step for each in workers) - before) / MEASURED_S
    endings = [each.ending for each in run.referee.records.values() if each.ending is not None]
    return Found(goodput, endings.count("counted") / len(endings))


@pytest.mark.slow
@pytest.mark.parametrize("delay", [6, "auto"])
def test_adaptive_grace_counts_more_pushes_and_costs_no_step(delay: int | str) -> None:
    none, auto, large = (
        measure(grace, fragment_sync_delay=delay) for grace in (0.0, "auto", LARGE)
    )
    assert auto.goodput > 0.98 * none.goodput, (none, auto)
    assert auto.participation > none.participation + 0.25, (none, auto)
    assert large.participation > 0.95, large
    assert large.goodput < 0.7 * auto.goodput, (auto, large)
