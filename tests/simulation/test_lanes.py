"""Whole runs with workers of several processes among the others: what holds for one holds for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulation.scenarios import MODES, a_scenario
from simulation.simulator import Simulation


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "fragments"])
@pytest.mark.parametrize("mode", MODES)
def test_every_promise_holds_where_workers_are_one_two_or_three_processes(
    mode: str, streams: bool, seed: int
) -> None:
    scenario = replace(a_scenario(mode, streams, seed), processes=(1, 2, 3), chunks=5)
    run = Simulation(scenario, seed).run()
    assert run.referee.versions_made > 0
    assert run.counted() > 0
    assert {process.habits.processes for process in run.processes} >= {2, 3}
