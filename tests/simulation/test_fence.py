"""A hub and its standby never both have the run, whatever the network and their machines do."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest

from diloco_broker.core import machine
from diloco_broker.standby import core as standby
from diloco_broker.standby import fence as rules
from diloco_broker.standby import lease
from diloco_worker.session import connection
from simulation.fence import Fence, FenceBroken, Troubles

SEEDS = 25  # a tenth of a second each
FIRST_SEEDS = range(1000, 1000 + SEEDS)
# None of these is drawn where a test plans nothing.
QUIET = Troubles(delays=0.0)
SABOTAGE_SEEDS = range(100)


@pytest.mark.slow
def test_two_hubs_never_both_have_the_run() -> None:
    why: Counter[bool] = Counter()
    versions = 0
    for seed in FIRST_SEEDS:
        fence = Fence(seed).run()
        why[bool(fence.taken_over)] += 1
        assert fence.releases, f"seed {seed}: the hub never had its lease"
        versions += fence.versions
    assert versions > SEEDS
    assert min(why[True], why[False]) > 0, why  # or one half of the promise was never tried


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_the_fence_holds_for_any_number_of_workers(workers: int) -> None:
    for seed in range(4):
        Fence(seed, workers).run()


def test_a_hub_keeps_its_lease_by_its_workers_alone() -> None:
    fence = Fence(3, 5, QUIET)
    for process in fence.processes:
        process.begins()
    fence.world.run(10.0)
    fence.standby.is_alive = False
    fence.world.run(100.0)
    assert fence.hub.may_release


def test_a_standby_takes_over_soon_after_workers_miss_a_dead_hub() -> None:
    fence = Fence(3, 5, QUIET)
    for process in fence.processes:
        process.begins()
    fence.world.run(10.0)
    fence.hub.is_alive = False
    fence.world.run(20.0)  # 4 s until they miss it
    assert fence.taken_over


# Each takes one rule away. The simulation must find out what comes of it.


def _lets_workers_forget_their_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SAFETY", 0.0)


def _lets_the_standby_forget_its_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "SAFETY", 0.0)


class Lenient(lease.Ballot):
    """One that takes half of the voters for a majority."""

    @property
    def supported_at(self) -> float:
        with patch.object(lease, "majority", lambda count: max(1, count // 2)):
            return super().supported_at


def _counts_a_minority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Ballot", Lenient)


def _takes_over_with_a_minority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "Ballot", Lenient)


def _goes_on_without_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "may_release", lambda _: True)
    monkeypatch.setattr(rules, "holds_rounds", lambda _: False)
    monkeypatch.setattr(rules, "sends_away", lambda _: [])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "sabotage",
    [
        _goes_on_without_a_lease,
        _lets_workers_forget_their_word,
        _lets_the_standby_forget_its_promise,
        _counts_a_minority,
        _takes_over_with_a_minority,
    ],
)
def test_a_broken_fence_is_found_out(sabotage: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(sabotage)
    sabotage(monkeypatch)
    assert any(_is_broken(seed) for seed in SABOTAGE_SEEDS)


def _is_broken(seed: int) -> bool:
    try:
        Fence(seed).run()
    except FenceBroken:
        return True
    return False
