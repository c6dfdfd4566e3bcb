"""Whole runs with relays: they die, are cut off, and workers move between them and the hub."""

from dataclasses import replace

import pytest

from simulation.scenarios import MODES, a_scenario
from simulation.simulator import Scenario, Simulation

TREE = {"north": "hub", "south": "hub", "deep": "south"}
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 6))]

# The two ways in which relays combine; the others take longer.
EACH_MODE = [
    mode if mode in ("streaming", "deterministic") else pytest.param(mode, marks=pytest.mark.slow)
    for mode in MODES
]


def with_relays(scenario: Scenario) -> Scenario:
    troubles = replace(scenario.troubles, relay_kills=0.05, relay_cuts=0.04, moves=0.05)
    config = replace(scenario.config, relays=True)
    return replace(scenario, config=config, relays=TREE, troubles=troubles)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "fragments"])
@pytest.mark.parametrize("mode", EACH_MODE)
def test_every_promise_holds_through_relays(mode: str, streams: bool, seed: int) -> None:
    run = Simulation(with_relays(a_scenario(mode, streams, seed)), seed).run()
    assert run.referee.versions_made > 0
    assert run.counted() > 0
