"""A data set through troubles: whatever happens, what is counted is in the parameters, and once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulation.scenarios import a_scenario
from simulation.simulator import Simulation
from simulation.units import counted, times_contained

NOT_SAVED, DURABLE, REWIND = 0, 2, 3  # places in `SAVING`


@pytest.mark.slow
@pytest.mark.parametrize("saved", [NOT_SAVED, DURABLE, REWIND], ids=["once", "durable", "rewind"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "fragments"])
@pytest.mark.parametrize("mode", ["streaming", "carry", "async"])
def test_each_unit_that_is_counted_is_in_the_parameters_once(
    mode: str, streams: bool, saved: int
) -> None:
    scenario = a_scenario(mode, streams, seed=1, saved=saved)
    run = Simulation(replace(scenario, has_units=True), seed=1).run()
    assert len(counted(run)) > 10
    assert times_contained(run) == dict.fromkeys(counted(run), 1)
