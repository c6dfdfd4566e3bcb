"""A broker that was killed goes on, in the core alone: from its checkpoint, its workers, or both."""

from dataclasses import replace

import pytest

from diloco_broker.core.effects import Revert
from diloco_broker.core.versions.fragment import TAGS_KEPT, TAGS_SAVED, WholeVersion
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.messages import Grant, Rejoin, Released, Standing, Welcome
from diloco_protocol.version import VersionId
from kit.core_harness import RUN, Stage, a_config, a_round, a_stage
from kit.restarts import (
    a_saved_run,
    ahead,
    assert_masters_are_what_is_handed_out,
    first,
    holding,
    next_incarnation,
)


def test_known_worker_that_is_away_is_named_and_waited_for_no_longer_than_recover_wait() -> None:
    crashed = a_saved_run("a", "b", rounds=1)
    stage = crashed.restarted(recover_wait=6.0)
    stage.passes(0.5)
    assert stage.shown()["waiting_for"].endswith(": a; b")
    a = stage.worker("a").comes_with(crashed.holdings())
    c = stage.worker("c").joins()
    assert stage.shown()["waiting_for"].endswith(": b")
    a.base = crashed.version()
    a.begins(11)
    assert a.error().retry
    assert stage.shown()["totals"]["rejected"] == 0, "'not now' is not a refusal"
    stage.passes(5.3)
    assert stage.state.round is None
    stage.passes(0.3)
    assert stage.round.number == 1
    a_round([a, c], 1)
    assert stage.reports[-1].averaged == 2


def test_newer_version_of_a_worker_that_comes_in_time_is_adopted() -> None:
    crashed = a_saved_run("a", "b", rounds=2)
    stage, (a,) = next_incarnation(crashed, "a")
    stage.passes(9.0)
    a.pulls()
    welcome = a.got(Welcome)
    assert (welcome.run, welcome.versions, welcome.first_round) == (None, (None,), 2)
    newer = ahead(crashed.holdings(), f0=1)
    b = stage.worker("b").comes_with(newer)
    assert (a.asked_for, b.asked_for) == ([], [0])
    assert a.last(Released) is None and not a.chunks, "no worker is told a version before"
    b.seeds()
    assert stage.version() == first(newer).version
    assert stage.round.number == 3
    assert_masters_are_what_is_handed_out(stage)
    assert a.holds() == stage.version()


def test_worker_that_comes_when_the_run_has_gone_on_does_not_change_it() -> None:
    crashed = a_saved_run("a", "b", rounds=2)
    stage, (a,) = next_incarnation(crashed, "a")
    stage.passes(9.9)
    a.beats()
    stage.passes(0.2)
    assert stage.round.number == 2
    b = stage.worker("b").comes_with(ahead(crashed.holdings(), f0=1))
    assert not b.asked_for
    assert stage.version().counter == 2
    assert stage.said("b holds", "version 3#", str(stage.version()))
    a_round([a, b], 2)
    assert stage.version().counter == 3


def test_checkpoint_without_workers_is_resumed_at_once() -> None:
    crashed = a_saved_run("a", rounds=2)
    newest = crashed.checkpoints[-1]
    stage = crashed.restarted(replace(newest, record=replace(newest.record, workers={})))
    stage.worker("z").joins()
    assert stage.round.number == 2


def test_each_fragment_is_adopted_from_the_worker_that_has_it_newest() -> None:
    crashed = a_saved_run("a", "b", "c", rounds=4, pieces=2)
    held = crashed.holdings()
    stage = crashed.restarted()
    of_a, of_b = ahead(held, f0=1), ahead(held, f1=2)
    a, b, c = (
        stage.worker(name).comes_with(each)
        for name, each in zip("abc", (of_a, of_b, held), strict=True)
    )
    assert (a.asked_for, b.asked_for) == ([0], [])
    a.seeds(0)
    assert (a.asked_for, b.asked_for, c.asked_for) == ([0], [1], [])
    assert stage.state.round is None
    b.seeds(1)
    assert stage.counters == [3, 4]
    assert stage.round.number == 7
    assert_masters_are_what_is_handed_out(stage)
    ledgers = [each.ledger for each in stage.state.versions.fragments]
    assert of_a[0] and ledgers[0] == of_a[0].ledger
    assert of_b[1] and ledgers[1] == of_b[1].ledger
    assert stage.saves == [7], "what no checkpoint has is saved"


@pytest.mark.parametrize("how", ["dies", "leaves", "sends nothing more", "sends NaN", "is kicked"])
def test_checkpoint_is_resumed_when_the_seed_worker_is_lost(how: str) -> None:
    crashed = a_saved_run("a", "b", rounds=2)
    stage, _ = next_incarnation(crashed, "b")
    a = stage.worker("a").comes_with(ahead(crashed.holdings(), f0=1))
    a.seeds(0, [0])
    match how:
        case "dies":
            a.dies()
        case "leaves":
            a.leaves()
        case "sends nothing more":
            stage.passes_with(32, "a", "b")
        case "sends NaN":
            a.seeds(0, [1], is_finite=False)
        case "is kicked":
            stage.kicks("a")
    stage.passes(10.0)
    assert stage.tensors.reverted == [Revert(0)]
    assert stage.version() == crashed.version()
    assert stage.round.number == 2
    assert_masters_are_what_is_handed_out(stage)
    assert not stage.saves, "the checkpoint has all of it"


@pytest.mark.parametrize(
    ("run", "counter"),
    [
        pytest.param(None, 0, id="none"),
        pytest.param(RUN, 2, id="older than the checkpoint's"),
        pytest.param(RUN, 3, id="the same"),
        pytest.param(RUN, 4, id="newer, and older than it said"),
        pytest.param("f" * 16, 5, id="of another run"),
    ],
)
def test_version_that_a_seed_worker_did_not_name_is_refused(run: str | None, counter: int) -> None:
    crashed = a_saved_run("a", "b", rounds=3)
    ours = crashed.version()
    stage, (b,) = next_incarnation(crashed, "b")
    a = stage.worker("a").comes_with(ahead(crashed.holdings(), f0=2))
    assert a.asked_for == [0]
    base = VersionId(ours.run if run == RUN else run, counter, 1) if run else None
    a.seeds(0, base=ours if counter == 3 else base)
    assert stage.version() == ours
    assert stage.round.number == 3
    assert not b.asked_for


def test_seed_worker_on_a_new_connection_goes_on_where_it_stopped() -> None:
    crashed = a_saved_run("a", "b", rounds=1)
    stage, _ = next_incarnation(crashed, "b")
    held = ahead(crashed.holdings(), f0=1)
    a = stage.worker("a").comes_with(held)
    a.seeds(0, [0])
    a.loses_connection()
    a.comes_with(held)
    a.seeds(0, [])
    grant = a.got(Grant)
    assert (grant.standing, grant.held) == (Standing.RESUME, b"\x01")
    a.seeds(0, [1])
    assert stage.version() == first(held).version
    assert Revert(0) not in stage.tensors.reverted


def test_worker_that_starts_fresh_never_gives_the_parameters_of_a_run_that_exists() -> None:
    crashed = a_saved_run("a", "b", rounds=1)
    stage = crashed.restarted()
    fresh = stage.worker("new").joins()
    fresh.seeds(0, [])
    assert fresh.error().code == "not_allowed"
    stage.passes(9.0)
    fresh.beats()
    stage.passes(2.0)
    assert not fresh.asked_for
    fresh.pulls()
    assert fresh.holds() == crashed.version() == stage.version()


def test_fresh_worker_that_is_asked_first_gives_way_to_one_that_holds_a_run() -> None:
    """Without a checkpoint the run is not known until a worker joins that holds a version."""
    stage = a_stage(workers=2, chunks=2)
    fresh = stage.worker("new").joins()
    assert fresh.asked_for == [0]
    fresh.seeds(0, [0])
    a = stage.worker("a").comes_with(holding(12))
    assert a.asked_for == [0]
    a.seeds()
    assert stage.version() == VersionId(RUN, 12, 5_012)
    assert_masters_are_what_is_handed_out(stage)


def test_other_run_and_other_model_are_refused_after_a_resume() -> None:
    stage = a_saved_run("a", "b", rounds=1).restarted()
    stranger = stage.worker("x").comes_with(holding(99))
    assert (stranger.error().code, stranger.error().retry) == ("run_differs", False)
    assert "x" not in stage.here
    other = Manifest((TensorEntry("other", (3,), "float32", Kind.TRAINABLE),))
    assert stage.worker("y").joins(manifest=other).error().code == "model_differs"


def test_worker_of_a_run_that_was_moved_aside_is_refused_and_the_new_run_begins_at_once() -> None:
    stage = Stage(a_config(2, bind="tcp://127.0.0.1:8512"), moved_aside=frozenset({RUN}))
    old = stage.worker("old").comes_with(holding(12, chunks=3))
    assert (old.error().code, old.error().retry) == ("run_differs", False)
    assert "--fresh" in old.error().text
    new = stage.worker("new").joins()
    assert new.asked_for == [0]
    stage.provide()
    assert stage.version().run != RUN


def test_rewound_run_ignores_newer_versions_of_workers() -> None:
    crashed = a_saved_run("a", "b", rounds=2)
    stage = crashed.restarted(recover="rewind")
    newer = ahead(crashed.holdings(), f0=5)
    stage.passes(0.1)
    assert stage.round.number == 2, "no worker is waited for"
    a, b = (stage.worker(name).comes_with(newer) for name in "ab")
    assert not a.asked_for + b.asked_for
    assert a.got(Welcome).versions == (stage.version(),)
    a.pulls()
    assert a.holds() == crashed.version(), "it waits above, and is given ours when it asks"
    for number in range(2, 5):
        base = first(newer).version if number == 2 else stage.version()
        for place, puppet in enumerate((a, b)):
            puppet.pushes(10 * number + place, base=base)
            assert stage.row(puppet.worker_id)["staleness"] == 0
        assert stage.version().counter == number + 1
    assert stage.counted() == [stage.counted()[0]] * 2
    assert ("lost", 903) not in stage.counted()[0]
    assert max(stage.counted()[0].values()) == 1


def test_newest_version_of_each_fragment_is_adopted_without_a_checkpoint() -> None:
    stage = a_stage(2, 2, num_fragments=2, sync_every=12)
    a = stage.worker("a").comes_with(holding(3, 2))
    b = stage.worker("b").comes_with(holding(2, 3))
    a.seeds(0)
    b.seeds(1)
    assert (a.asked_for, b.asked_for) == ([0], [1])
    assert stage.counters == [3, 3]
    assert [each["gradients"] for each in stage.shown()["fragments"]] == [3, 3], "schedules go on"
    assert stage.round.number == 6
    assert stage.version().run == RUN
    assert_masters_are_what_is_handed_out(stage)


def test_worker_of_an_older_run_does_not_hold_up_the_run_that_is_adopted() -> None:
    stage = a_stage(workers=3, chunks=2, min_workers=2)
    x = stage.worker("x").comes_with(holding(3, run="b" * 16))
    a, b = (stage.worker(name).comes_with(holding(12)) for name in "ab")
    a.seeds()
    assert x.last(Rejoin) is not None
    x.comes_with(holding(3, run="b" * 16))
    assert x.error().code == "run_differs"
    stage.worker("c").comes_with(holding(12)).leaves()
    stage.passes(11.0)
    for place, puppet in enumerate((a, b), start=1):
        puppet.pushes(place, base=VersionId(RUN, 12, 5_012))
    assert stage.version().counter == 13


# Branches: rounds that a worker has and its broker has not are named.


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


def test_abandoned_branch_is_named_in_this_and_the_next_incarnation() -> None:
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
    for incarnation in (stage, again):
        incarnation.worker("b").comes_with(theirs)
        assert len(incarnation.said("b holds", "version 2#")) == 1


def test_two_workers_that_bring_two_branches_are_told_apart() -> None:
    crashed = a_saved_run("a", "b", rounds=2)
    of_a = ahead(crashed.holdings(), f0=1)
    held = of_a[0]
    assert held is not None
    of_b = (replace(held, version=VersionId(held.version.run, 3, 77)), None)
    stage = crashed.restarted()
    a = stage.worker("a").comes_with(of_a)
    stage.worker("b").comes_with(of_b)
    a.seeds()
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
