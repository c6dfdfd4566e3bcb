"""Trees of brokers through kills, broken connections and moves: each push counts once."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_broker.core.rules.sites import contents
from diloco_broker.relay.unsettled import Unsettled
from simulation.sites import RelayHost
from simulation.tree import Faults, Tree

HEAVY = Faults(workers=100, relays=120, connections=150, moves=100)


@pytest.mark.parametrize("seed", range(2))
def test_tree_keeps_its_promises_through_kills_breaks_and_moves(seed: int) -> None:
    tree = Tree(seed, HEAVY).run(200.0)
    assert not tree.refused, tree.refused
    assert len(tree.told) > 200


def test_tree_without_a_model_begins_with_one_workers_and_knows_what_counted() -> None:
    """Each relay keeps what few bits left out of just those of its pushes that are in a version."""
    tree = Tree(1, HEAVY, has_model=False).run(200.0)
    assert not tree.refused, tree.refused
    assert len(tree.told) > 200
    hosts = [each for each in tree.hosts.values() if isinstance(each, RelayHost)]
    assert sum(host.residuals.settled for host in hosts) > 50


def test_push_whose_verdict_is_not_heard_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unsettled, "found", lambda *_: [])
    with pytest.raises(AssertionError, match=r"(north|south|middle|deep) meant"):
        run_trees(range(2))


@pytest.mark.parametrize(("seed", "has_model"), [(0, True), (1, True), (1, False)])
def test_tree_outlives_its_hub(seed: int, has_model: bool) -> None:
    tree = Tree(seed, Faults(hubs=40, lost_disks=0.3), has_model=has_model).run(200.0)
    assert not tree.refused, tree.refused


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_tree_keeps_its_promises_for_hours(seed: int) -> None:
    Tree(seed, Faults(hubs=10, lost_disks=0.2)).run(3600.0)


def test_rule_that_is_taken_out_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any) -> None:
        """Whatever is in a push of a relay, it is taken."""

    monkeypatch.setattr(contents, "_check_others", nothing)
    with pytest.raises(AssertionError, match=r"counted again|twice (in one round|at a site)"):
        run_trees(range(20))


def run_trees(seeds: range) -> None:
    for seed in seeds:
        Tree(seed, HEAVY).run(200.0)
