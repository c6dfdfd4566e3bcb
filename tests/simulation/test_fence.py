"""A hub and its standby never both have the run, whatever the network, their machines and clocks do."""

import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from diloco_broker.core import machine
from diloco_broker.standby import core as standby
from diloco_broker.standby import fence, lease
from diloco_worker.session import connection
from kit.core_harness import a_config
from simulation.network import Weather
from simulation.simulator import Scenario, Simulation
from simulation.standby import STANDBY
from simulation.tensors import Violation
from simulation.troubles import NO_TROUBLES, Troubles

SEEDS = range(16)
SABOTAGE_SEEDS = range(60)
WORKERS = (1, 2, 3, 3, 4, 5, 7, 9)
# Hub and standby lose each other and their workers, for less than a lease and for more.
TROUBLES = Troubles(
    seconds=100.0,
    kills=0.02,
    breaks=0.03,
    outages=0.03,
    leaves=0.0,
    joins=0.0,
    freezes=0.03,
    restarts=0.02,
    hub_cuts=0.03,
    hub_stops=0.03,
    splits=0.2,
    standby_kills=0.02,
    returns=1.0,
    orderly=0.0,
    back_s=2.0,
    outage_s=8.0,
    restart_s=5.0,
)


def scenario(workers: int, troubles: Troubles = TROUBLES) -> Scenario:
    """A small model, and messages that are held up."""
    config = a_config(
        1,
        sync_every=4,
        save_dir="run",
        recover_wait=2.0,
        disconnect_grace=1.0,
        heartbeat_timeout=6.0,
        standby=True,
        lease=3.0,
    )
    return Scenario(
        config,
        workers=workers,
        most=workers,
        chunks=1,
        steps_per_s=2.0,
        goal=1,
        troubles=troubles,
        weather=Weather(stall=0.01, stall_s=8.0),
        habits={},
        thoroughness=1000,
    )


def runs(seeds: range) -> Iterator[Simulation]:
    return (Simulation(scenario(WORKERS[seed % len(WORKERS)]), seed).run() for seed in seeds)


@pytest.mark.slow
def test_two_hubs_never_both_have_the_run() -> None:
    ended = list(runs(SEEDS))
    assert sum(run.term is not None for run in ended) > len(SEEDS) / 2
    assert all(run.referee.versions_made for run in ended)


def test_hub_keeps_its_lease_by_its_workers_alone() -> None:
    run = Simulation(scenario(3, NO_TROUBLES), seed=3)
    for _ in range(3):
        run.newcomer()
    run.passes(10.0)
    assert run.standby is not None
    run.standby.dies()
    run.is_away(STANDBY, math.inf)
    run.passes(30.0)
    before = run.referee.versions_made
    run.passes(30.0)
    assert run.referee.versions_made > before


class Lenient(lease.Ballot):
    """One that takes half of the voters for a majority."""

    @property
    def supported_at(self) -> float:
        with patch.object(lease, "majority", lambda count: max(1, count // 2)):
            return super().supported_at


# Each takes one rule away: the object, its attribute, and the new value.
SABOTAGES: dict[str, list[tuple[object, str, Any]]] = {
    "goes on without a lease": [
        (fence, "may_release", lambda _: True),
        (fence, "holds_rounds", lambda _: False),
        (fence, "sends_away", lambda _: []),
    ],
    "workers vote for both": [(connection, "SAFETY", 0.0)],
    "standby forgets its promise": [(standby, "SAFETY", 0.0)],
    "counts a minority": [(machine, "Ballot", Lenient)],
    "takes over with a minority": [(standby, "Ballot", Lenient)],
}


@pytest.mark.nightly
@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_a_broken_fence_is_found_out(sabotage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for change in SABOTAGES[sabotage]:
        monkeypatch.setattr(*change)
    with pytest.raises(Violation, match="and was replaced"):
        list(runs(SABOTAGE_SEEDS))
