"""A week of 32 workers, 125 faults an hour: every promise holds, and only killed workers lose work."""

from collections import Counter

import pytest

from simulation.simulator import Simulation
from simulation.week import MODES, a_week, coarse


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_week_of_faults_costs_no_step_of_a_worker_that_was_not_killed(mode: str) -> None:
    with coarse():
        run = Simulation(a_week(mode), seed=1).run()
    steps: Counter[str] = Counter()  # in pushes that count, or are still in flight
    for record in run.referee.records.values():
        if record.ending in (None, "counted") and not record.is_lost:
            steps[record.process] += record.push.steps
    unharmed = [process for process in run.processes if not process.is_killed]
    assert 100 < len(unharmed) < len(run.processes) - 1000, "as many are killed as in a week"
    for process in unharmed:
        assert steps[process.name] == process.training.frozen_steps, process.name
