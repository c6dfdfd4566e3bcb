"""What few bits leave out is neither lost nor counted twice, whatever becomes of the pushes."""

from dataclasses import replace

import pytest

from simulation.residuals import Residuals
from simulation.scenarios import MODES, a_scenario
from simulation.simulator import BUSY, Simulation

# Where a worker's grant was lost, or a broker restarted, between a refusal and the next version.
SEEDS = {"streaming": (1, 2, 6, 8, 19, 27, 35)}


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "fragments"])
@pytest.mark.parametrize("mode", MODES)
def test_each_worker_keeps_exactly_what_was_left_out_of_what_counts(
    monkeypatch: pytest.MonkeyPatch, mode: str, streams: bool
) -> None:
    """Many pushes are refused behind their first chunks, which count all the same."""
    made: list[Residuals] = []
    begins = Residuals.__init__

    def noted(residuals: Residuals, name: str, worker_id: str) -> None:
        begins(residuals, name, worker_id)
        made.append(residuals)

    monkeypatch.setattr(Residuals, "__init__", noted)
    monkeypatch.setitem(BUSY, "blunders", 0.1)
    for seed in SEEDS.get(mode, (1, 2)):
        scenario = replace(a_scenario(mode, streams, seed), wants=({"wire_dtype": "int4"},))
        Simulation(scenario, seed).run()
    if mode == "streaming":
        assert sum(each.settled_in_part for each in made) > 0
