"""Trees of brokers through kills, broken connections and moves: each push counts once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_broker.core import events
from diloco_broker.core.machine import RULES
from diloco_broker.core.sites import contents
from diloco_broker.relay.unsettled import Unsettled
from simulation.sites import Pace, RelayHost
from simulation.tree import Faults, Tree

HEAVY = Faults(workers=100, relays=120, connections=150, moves=100)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_tree_keeps_its_promises_through_kills_breaks_and_moves(seed: int) -> None:
    tree = Tree(seed, HEAVY).run(200.0)
    assert not tree.refused, tree.refused
    assert len(tree.told) > 200


@pytest.mark.slow
def test_tree_without_a_model_begins_with_one_workers_and_knows_what_counted() -> None:
    """Each relay keeps what few bits left out of just those of its pushes that are in a version."""
    tree = Tree(1, HEAVY, has_model=False).run(200.0)
    assert not tree.refused, tree.refused
    assert len(tree.told) > 200
    hosts = [each for each in tree.hosts.values() if isinstance(each, RelayHost)]
    assert sum(host.residuals.settled for host in hosts) > 50


@pytest.mark.nightly
def test_push_whose_verdict_is_not_heard_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unsettled, "found", lambda *_: [])
    with pytest.raises(AssertionError, match=r"(north|south|middle|deep) meant"):
        run_trees(range(2))


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "has_model"), [(0, True), (1, True), (1, False)])
def test_tree_outlives_its_hub(seed: int, has_model: bool) -> None:
    tree = Tree(seed, Faults(hubs=40, lost_disks=0.3), has_model=has_model).run(200.0)
    assert not tree.refused, tree.refused


MODES: dict[str, dict[str, Any]] = {
    "fragments": {"num_fragments": 3},
    "fragments, and a hub that does not wait": {"num_fragments": 2, "quorum": 2, "grace": 0.5},
    "async": {"mode": "async"},
    "async with fragments": {"mode": "async", "num_fragments": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_tree_keeps_its_promises_in_every_mode(mode: str) -> None:
    tree = Tree(1, replace(HEAVY, hubs=20, lost_disks=0.3), **MODES[mode]).run(60.0)
    assert not tree.refused, tree.refused
    assert len(tree.told) > 100


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200, 202))
@pytest.mark.parametrize("mode", MODES)
def test_tree_keeps_its_promises_in_every_mode_for_long(mode: str, seed: int) -> None:
    Tree(seed, Faults(hubs=10, lost_disks=0.2, cuts=5.0), **MODES[mode]).run(1200.0)


@pytest.mark.nightly
def test_what_is_too_old_is_refused_alone() -> None:
    tree = Tree(0, Faults(), mode="async", max_staleness=2).run(15.0)
    assert tree.told
    assert {code for _, code in tree.refused} == {"stale"}


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 104))
def test_tree_keeps_its_promises_for_hours(seed: int) -> None:
    Tree(seed, Faults(hubs=10, lost_disks=0.2)).run(3600.0)


@pytest.mark.nightly
def test_rule_that_is_taken_out_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any) -> None:
        """Whatever is in a push of a relay, it is taken."""

    monkeypatch.setattr(contents, "_check_others", nothing)
    with pytest.raises(AssertionError, match=r"counted again|twice (in one round|at a site)"):
        run_trees(range(20))


LONG_CUTS = Faults(workers=0, relays=0, connections=0, moves=150, cuts=100)


def tree_with_long_cuts(seed: int) -> Tree:
    """Many rounds go by while a site is cut off, and its workers move."""
    pace = Pace(cycle=(0.2, 0.6), cut=(15.0, 40.0))
    places = ("north", "north", "south", "hub")
    return Tree(seed, LONG_CUTS, pace=pace, places=places).run(60.0)


@pytest.mark.parametrize("seed", [2, 6, 28])
def test_site_that_was_cut_off_for_many_rounds_counts_nothing_again(seed: int) -> None:
    tree = tree_with_long_cuts(seed)
    assert {code for _, code in tree.refused} <= {"stale"}
    assert len(tree.told) > 100


@pytest.mark.nightly
def test_ledger_that_is_trusted_beyond_its_memory_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contents, "_check_memory", lambda *_: None)
    with pytest.raises(AssertionError, match="counted again"):
        tree_with_long_cuts(28)


@pytest.mark.nightly
def test_site_that_waits_for_its_parent_in_an_earlier_round_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule against waiting crosswise: here nobody hears that a push is in a later round."""
    monkeypatch.setitem(RULES, events.RoundNamed, lambda *_: iter(()))
    tree = Tree(1, HEAVY, num_fragments=3, quorum=2, grace=0.5)
    with pytest.raises(AssertionError, match="no progress in calm"):
        tree.run(30.0)


def run_trees(seeds: range) -> None:
    for seed in seeds:
        Tree(seed, HEAVY).run(200.0)
