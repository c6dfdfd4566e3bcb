"""Trees of brokers through kills, broken connections and moves: each push counts once."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_broker.core.rules.sites import contents
from simulation.tree import Faults, Tree

HEAVY = Faults(workers=100, relays=120, connections=150, moves=100)


@pytest.mark.parametrize("seed", range(2))
def test_tree_keeps_its_promises_through_kills_breaks_and_moves(seed: int) -> None:
    tree = Tree(seed, HEAVY).run(200.0)
    assert not tree.refused, tree.refused
    assert len(tree.told) > 200


@pytest.mark.parametrize("seed", range(2))
def test_tree_outlives_its_hub(seed: int) -> None:
    tree = Tree(seed, Faults(hubs=40, lost_disks=0.3)).run(200.0)
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
