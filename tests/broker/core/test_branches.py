"""Branches of a run, in the core alone: rounds that a worker has and its broker has not are named."""

from __future__ import annotations

from dataclasses import replace

from diloco_broker.core.versions.fragment import TAGS_KEPT, TAGS_SAVED, WholeVersion
from diloco_protocol.version import VersionId
from kit.restarts import a_saved_run, ahead


def test_branch_of_a_worker_that_was_away_is_named_when_the_counters_are_equal() -> None:
    """Killed before a save; the broker makes the round again without the one that had it."""
    crashed = a_saved_run("a", "b", rounds=2)
    theirs = ahead(crashed.holdings(), f0=1)
    stage = crashed.restarted(recover_wait=5.0)
    a = stage.worker("a").comes_with(crashed.holdings())
    stage.passes(5.1)
    a.pushes(21)
    stage.passes(5.1)
    b_held, ours = theirs[0], stage.version()
    assert b_held is not None
    assert (b_held.version.counter, ours.counter) == (3, 3)
    stage.worker("b").comes_with(theirs)
    assert len(stage.said("b holds", "branch", str(b_held.version), str(ours))) == 1


def test_branch_that_the_broker_has_left_behind_is_named_in_this_life_and_the_next() -> None:
    crashed = a_saved_run("a", "b", rounds=1)
    theirs = ahead(crashed.holdings(), f0=1)
    stage = crashed.restarted(recover_wait=0.0)
    a = stage.worker("a").comes_with(crashed.holdings())
    for number in range(3):
        stage.passes(0.2)
        a.pushes(20 + number, base=stage.version())
    assert stage.version().counter == 4
    again = stage.restarted()
    again.worker("a").comes_with(stage.holdings())
    again.passes(0.2)
    again.worker("c").comes_with(crashed.holdings())
    assert not again.said("branch"), "c is merely behind"
    for life in (stage, again):
        life.worker("b").comes_with(theirs)
        assert len(life.said("b holds", "version 2#")) == 1


def test_two_workers_that_bring_two_branches_are_told_apart() -> None:
    crashed = a_saved_run("a", "b", rounds=2)
    of_a = ahead(crashed.holdings(), f0=1)
    held = of_a[0]
    assert held is not None
    of_b = (replace(held, version=VersionId(held.version.run, 3, 77)), None)
    stage = crashed.restarted()
    a = stage.worker("a").comes_with(of_a)
    stage.worker("b").comes_with(of_b)
    a.donates()
    assert stage.version() == held.version
    named = stage.said("another branch")
    assert len(named) == 1
    assert named[0].startswith(f"b holds version {of_b[0].version}")


def test_names_of_versions_are_remembered_up_to_a_bound() -> None:
    stage = a_saved_run("a", rounds=1)
    each = stage.state.versions[0]
    run = stage.version().run
    for counter in range(2, TAGS_KEPT + 100):
        record = replace(each.record, version=VersionId(run, counter, counter))
        each.set_current(WholeVersion(record, each.wires))
    assert len(each.tags) == TAGS_KEPT and max(each.tags) == TAGS_KEPT + 99
    assert list(each.newest_tags()) == list(each.tags)[-TAGS_SAVED:]
