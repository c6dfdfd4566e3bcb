"""A standby takes over in whole runs: promises hold before and after, and one broker has the run."""

import math
from dataclasses import replace
from typing import Any

import pytest

from kit.core_harness import a_config
from simulation.scenarios import MODES, a_scenario
from simulation.simulator import NO_TROUBLES, Scenario, Simulation
from simulation.standby import HUB

ADOPT = 1  # of `SAVING`


def with_standby(scenario: Scenario) -> Scenario:
    """The hub is killed and cut off for longer than its lease, and its standby is killed as well."""
    troubles = replace(scenario.troubles, restarts=0.03, orderly=0.0, restart_s=6.0)
    troubles = replace(troubles, hub_cuts=0.03, splits=0.03, standby_kills=0.02)
    config = replace(scenario.config, standby=True, lease=3.0)
    return replace(scenario, config=config, troubles=troubles)


EACH_MODE = [
    mode if mode == "streaming" else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES
]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2, 3))]
)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "fragments"])
@pytest.mark.parametrize("mode", EACH_MODE)
def test_every_promise_holds_through_takeovers(mode: str, streams: bool, seed: int) -> None:
    run = Simulation(with_standby(a_scenario(mode, streams, seed, ADOPT)), seed).run()
    assert run.referee.versions_made > 0
    assert run.counted() > 0


@pytest.mark.parametrize("fields", [{"mode": "async"}, {"num_fragments": 2}], ids=str)
def test_workers_follow_to_the_standby_of_a_hub_that_is_gone(fields: dict[str, Any]) -> None:
    config = a_config(
        3, save_dir="run", standby=True, lease=3.0, sync_every=8, recover_wait=5.0, **fields
    )
    run = Simulation(Scenario(config, workers=3, speeds=(1.0, 1.0), troubles=NO_TROUBLES), seed=1)
    for _ in range(3):
        run.newcomer()
    run.passes(30.0)
    before = run.referee.versions_made
    run.hub.dies()
    run.is_away(HUB, math.inf)
    run.passes(60.0)
    assert run.term == 1
    assert before > 5
    assert run.referee.versions_made > before + 5
