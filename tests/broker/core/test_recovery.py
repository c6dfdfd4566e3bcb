"""A broker that was killed goes on, in the core alone: from its checkpoint, its workers, or both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_broker.core.effects import Revert
from diloco_broker.core.feed import EventLog, LoopFigures, snapshot
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.messages import Grant, Rejoin, Released, Standing, Welcome
from diloco_protocol.version import Ledger, VersionId
from kit.core_harness import RUN, Held, Holdings, Puppet, Stage, a_config, a_stage, layered
from kit.noted_tensors import Wire

MODES: dict[str, dict[str, Any]] = {
    "streaming": {},
    "staged": {"deterministic": True},
    "async": {"mode": "async"},
}


def a_run(*worker_ids: str, rounds: int = 0, pieces: int = 1, **options: Any) -> Stage:
    """A run that saves, in which each of these workers has pushed once for so many rounds.

    The push of the first worker for round n is 10 n + 1, that of the second 10 n + 2, ...
    """
    options = {"workers": len(worker_ids), "chunks": 2, "save_dir": "run", **options}
    if pieces > 1:
        options |= {"num_fragments": pieces, "sync_every": 12}
    stage = a_stage(**options)
    puppets = stage.joined(*worker_ids)
    for number in range(rounds):
        a_round(puppets, number, pieces)
    return stage


def a_round(puppets: list[Puppet], number: int, pieces: int = 1) -> None:
    for place, puppet in enumerate(puppets, start=1):
        puppet.pushes(10 * number + place, fragment=number % pieces)


def feed(stage: Stage) -> dict[str, Any]:
    figures = LoopFigures("tcp://127.0.0.1:1", 0.0, 0.0, 0)
    return snapshot(stage.state, EventLog(), figures, 1, stage.now)


def ahead(held: Holdings, **steps: int) -> Holdings:
    """The same with some fragments newer; `f1=2`: fragment 1 by two versions."""
    newer = list(held)
    for name, by in steps.items():
        fragment = int(name[1:])
        old = held[fragment]
        assert old is not None
        counter = old.version.counter + by
        ledger = old.ledger.with_push("lost", 900 + counter, Bitmap.full(len(old.wires)))
        version = VersionId(old.version.run, counter, 5_000 + counter)
        wires = tuple(Wire((*wire.contents, ("lost", 900 + counter))) for wire in old.wires)
        newer[fragment] = Held(version, ledger, wires)
    return tuple(newer)


def counters(stage: Stage) -> list[int]:
    return [stage.version(fragment).counter for fragment in range(stage.config.num_fragments)]


def assert_masters_are_what_is_handed_out(stage: Stage) -> None:
    for fragment, versions in enumerate(stage.state.versions.fragments):
        assert tuple(stage.tensors.masters(fragment)) == versions.wires, f"fragment {fragment}"


# Whom a broker waits for.


def test_run_goes_on_at_once_when_all_known_workers_are_back() -> None:
    crashed = a_run("a", "b", rounds=2)
    held = crashed.holdings()
    stage = crashed.restarted()
    a, b = (stage.worker(name).comes_with(held) for name in "ab")
    assert stage.round.number == 2
    assert stage.version() == crashed.version()
    assert not a.asked_for
    assert not b.asked_for
    a_round([a, b], 2)
    assert [dict(chunk) for chunk in stage.counted()] == [
        {(name, 10 * n + place): 1 for n in range(3) for place, name in ((1, "a"), (2, "b"))}
    ] * 2


def test_known_worker_that_is_away_is_waited_for_and_no_longer_than_recover_wait() -> None:
    crashed = a_run("a", "b", rounds=1)
    stage = crashed.restarted(recover_wait=6.0)
    stage.passes(3.0)
    stage.worker("a").comes_with(crashed.holdings())
    stage.worker("c").joins()
    stage.passes(2.8)
    assert stage.state.round is None
    stage.passes(0.3)
    assert stage.round.number == 1


def test_while_the_run_waits_for_known_workers_log_status_and_refusals_say_for_whom() -> None:
    crashed = a_run("a", "b", rounds=1)
    stage = crashed.restarted(recover_wait=6.0)
    stage.passes(0.5)
    whom = "workers of the run that may hold newer rounds: "
    assert feed(stage)["waiting_for"] == f"for {whom}a; b"
    a = stage.worker("a").comes_with(crashed.holdings())
    whom += "b"
    assert feed(stage)["waiting_for"] == f"for {whom}"
    said = stage.said("Before the run goes on, waiting")
    assert len(said) == 1, "once, and not for each that comes back"
    assert said[0].endswith("s at most for workers of the run that may hold newer rounds: a; b.")
    a.base = crashed.version()
    a.begins(11)
    assert a.error().retry
    assert whom in a.error().text
    assert feed(stage)["totals"]["rejected"] == 0, "'not now' is no refusal"
    stage.passes(5.6)
    a.pushes(11)
    assert stage.round.number == 1
    assert whom not in str(feed(stage)["waiting_for"])


def test_newer_version_of_a_worker_that_comes_in_time_is_adopted() -> None:
    crashed = a_run("a", "b", rounds=2)
    stage = crashed.restarted()
    a = stage.worker("a").comes_with(crashed.holdings())
    stage.passes(9.0)
    a.beats()
    newer = ahead(crashed.holdings(), f0=1)
    b = stage.worker("b").comes_with(newer)
    assert (a.asked_for, b.asked_for) == ([], [0])
    b.donates()
    assert stage.version() == newer[0].version  # type: ignore[union-attr]
    assert stage.round.number == 3
    assert_masters_are_what_is_handed_out(stage)
    assert a.last(Released) is None
    a.pulls(after=2)
    assert a.holds() == stage.version()


def test_worker_that_comes_when_the_run_has_gone_on_does_not_change_it() -> None:
    crashed = a_run("a", "b", rounds=2)
    stage = crashed.restarted()
    a = stage.worker("a").comes_with(crashed.holdings())
    stage.passes(9.9)
    a.beats()
    stage.passes(0.2)
    assert stage.round.number == 2
    b = stage.worker("b").comes_with(ahead(crashed.holdings(), f0=1))
    assert not b.asked_for
    assert stage.version().counter == 2
    assert "b holds version 3#" in "".join(stage.logs)
    a_round([a, b], 2)
    assert stage.version().counter == 3


def test_checkpoint_that_knows_nobody_is_gone_on_with_at_once() -> None:
    crashed = a_run("a", rounds=2)
    newest = crashed.checkpoints[-1]
    stage = crashed.restarted(replace(newest, record=replace(newest.record, workers={})))
    stage.worker("z").joins()
    assert stage.round.number == 2


def test_before_the_run_goes_on_nobody_is_told_a_version() -> None:
    crashed = a_run("a", "b", rounds=2)
    stage = crashed.restarted()
    a = stage.worker("a").comes_with(crashed.holdings())
    a.pulls()
    welcome = a.got(Welcome)
    assert (welcome.run, welcome.versions, welcome.first_round) == (None, (None,), 2)
    assert a.last(Released) is None
    assert not a.chunks
    b = stage.worker("b").comes_with(ahead(crashed.holdings(), f0=1))
    assert a.last(Released) is None
    b.donates()
    assert a.holds() == stage.version()
    assert stage.version().counter == 3


# Who gives what.


def test_each_fragment_is_adopted_from_whoever_has_it_newest() -> None:
    crashed = a_run("a", "b", "c", rounds=4, pieces=2)
    held = crashed.holdings()
    stage = crashed.restarted()
    of_a, of_b = ahead(held, f0=1), ahead(held, f1=2)
    a = stage.worker("a").comes_with(of_a)
    b = stage.worker("b").comes_with(of_b)
    c = stage.worker("c").comes_with(held)
    assert (a.asked_for, b.asked_for) == ([0], [])
    a.donates(0)
    assert (a.asked_for, b.asked_for, c.asked_for) == ([0], [1], [])
    assert stage.state.round is None
    b.donates(1)
    assert counters(stage) == [3, 4]
    assert stage.round.number == 7
    assert_masters_are_what_is_handed_out(stage)
    ledgers = [each.ledger for each in stage.state.versions.fragments]
    assert ledgers[0] == of_a[0].ledger  # type: ignore[union-attr]
    assert ledgers[1] == of_b[1].ledger  # type: ignore[union-attr]
    assert stage.saves == [7], "what no checkpoint has is saved"


def test_donor_that_dies_half_way_is_reverted_and_the_next_one_asked() -> None:
    crashed = a_run("a", "b", rounds=4, pieces=2)
    held = crashed.holdings()
    stage = crashed.restarted()
    a = stage.worker("a").comes_with(ahead(held, f0=2, f1=1))
    b = stage.worker("b").comes_with(ahead(held, f0=1, f1=1))
    assert (a.asked_for, b.asked_for) == ([0, 1], [])
    a.donates(0, [0])
    a.dies()
    assert stage.tensors.reverted == [Revert(0)], "fragment 1 was not touched"
    b.beats()
    assert not b.asked_for, "the one that is ahead of all may come back"
    stage.passes(10.0)
    assert b.asked_for == [0, 1]
    b.donates(0)
    b.donates(1)
    assert counters(stage) == [3, 3]
    assert_masters_are_what_is_handed_out(stage)


@pytest.mark.parametrize("how", ["dies", "leaves", "sends nothing more", "sends NaN", "is kicked"])
def test_without_a_donor_left_the_checkpoint_s_own_is_gone_on_with(how: str) -> None:
    crashed = a_run("a", "b", rounds=2)
    stage = crashed.restarted()
    b = stage.worker("b").comes_with(crashed.holdings())
    a = stage.worker("a").comes_with(ahead(crashed.holdings(), f0=1))
    a.donates(0, [0])
    match how:
        case "dies":
            a.dies()
        case "leaves":
            a.leaves()
        case "sends nothing more":
            for _ in range(32):
                a.beats()
                b.beats()
                stage.passes(1.0)
        case "sends NaN":
            a.donates(0, [1], is_finite=False)
        case "is kicked":
            stage.kicks("a")
    stage.passes(10.0)
    assert stage.tensors.reverted == [Revert(0)]
    assert stage.version() == crashed.version()
    assert stage.round.number == 2
    assert_masters_are_what_is_handed_out(stage)
    assert not stage.saves, "the checkpoint has all of it"


def test_donor_that_breaks_off_after_another_one_was_adopted_takes_nothing_of_it_away() -> None:
    """Fragment 0 comes from a; c joins late, has it newer, and dies in the middle of giving it."""
    crashed = a_run("a", "b", rounds=2, pieces=2)
    held = crashed.holdings()
    stage = crashed.restarted()
    a = stage.worker("a").comes_with(ahead(held, f0=2))
    b = stage.worker("b").comes_with(ahead(held, f1=1))
    a.donates(0)
    assert b.asked_for == [1]
    c = stage.worker("c").comes_with(ahead(held, f0=3))
    b.donates(1)
    assert c.asked_for == [0]
    c.donates(0, [0])
    c.leaves()
    for fragment in a.asked_for[1:]:  # what it gave has been overwritten
        a.donates(fragment)
    assert counters(stage) == [3, 2]
    assert_masters_are_what_is_handed_out(stage)


def test_version_other_than_the_one_a_donor_said_it_holds_is_refused() -> None:
    crashed = a_run("a", "b", rounds=3)
    held = crashed.holdings()
    ours = held[0]
    assert ours is not None
    for base in (
        None,
        VersionId(ours.version.run, 2, 1),  # older than the checkpoint's
        ours.version,  # the same
        VersionId(ours.version.run, 4, 1),  # newer, and older than it said
        VersionId("f" * 16, 5, 5_005),  # of another run
    ):
        stage = crashed.restarted()
        b = stage.worker("b").comes_with(held)
        a = stage.worker("a").comes_with(ahead(held, f0=2))
        assert a.asked_for == [0]
        a.donates(0, base=base)
        assert stage.version() == ours.version, base
        assert stage.round.number == 3
        assert not b.asked_for


def test_donor_that_gives_an_older_version_than_it_said_is_refused_without_a_checkpoint_too() -> (
    None
):
    stage = a_stage(workers=2, chunks=2)
    a = stage.worker("a").comes_with(holding(12))
    b = stage.worker("b").comes_with(holding(11))
    assert a.asked_for == [0]
    a.donates(0, base=VersionId(RUN, 3, 3))
    assert a.error().push_id == a.push_id
    assert b.asked_for == [0]
    b.donates()
    assert stage.version() == VersionId(RUN, 11, 5_011)


def test_donor_on_a_new_connection_goes_on_where_it_stopped() -> None:
    crashed = a_run("a", "b", rounds=1)
    stage = crashed.restarted()
    held = ahead(crashed.holdings(), f0=1)
    stage.worker("b").comes_with(crashed.holdings())
    a = stage.worker("a").comes_with(held)
    a.donates(0, [0])
    a.loses_connection()
    a.comes_with(held)
    a.donates(0, [])
    grant = a.got(Grant)
    assert (grant.standing, grant.held) == (Standing.RESUME, b"\x01")
    a.donates(0, [1])
    assert stage.version() == held[0].version  # type: ignore[union-attr]
    assert Revert(0) not in stage.tensors.reverted


def test_worker_that_starts_fresh_never_gives_the_parameters_of_a_run_that_exists() -> None:
    crashed = a_run("a", "b", rounds=1)
    stage = crashed.restarted()
    fresh = stage.worker("new").joins()
    fresh.donates(0, [])
    assert fresh.error().code == "not_allowed"
    stage.passes(9.0)
    fresh.beats()
    stage.passes(2.0)
    assert not fresh.asked_for
    assert stage.version() == crashed.version()
    fresh.pulls()
    assert fresh.holds() == crashed.version()


def test_fresh_worker_that_is_asked_first_gives_way_to_one_that_holds_a_run() -> None:
    """Without any checkpoint nobody knows of the run until somebody comes who holds a version."""
    stage = a_stage(workers=2, chunks=2)
    fresh = stage.worker("new").joins()
    assert fresh.asked_for == [0]
    fresh.donates(0, [0])
    a = stage.worker("a").comes_with(holding(12))
    assert a.asked_for == [0]
    a.donates()
    assert stage.version() == VersionId(RUN, 12, 5_012)
    assert_masters_are_what_is_handed_out(stage)


def test_worker_of_another_run_is_refused_while_a_checkpoint_is_gone_on_with() -> None:
    crashed = a_run("a", "b", rounds=1)
    stage = crashed.restarted()
    stranger = stage.worker("x").comes_with(holding(99))
    assert (stranger.error().code, stranger.error().retry) == ("run_differs", False)
    assert "x" not in stage.state.members


def test_other_model_is_refused_while_a_checkpoint_is_gone_on_with() -> None:
    crashed = a_run("a", "b", rounds=1)
    stage = crashed.restarted()
    other = Manifest((TensorEntry("other", (3,), "float32", Kind.TRAINABLE),))
    stranger = stage.worker("x").joins(manifest=other)
    assert stranger.error().code == "model_differs"
    assert "it goes on from the checkpoint before round 1" in stranger.error().text


# Back to the checkpoint.


def test_rewound_run_ignores_what_workers_have_newer_and_nobody_stands_still() -> None:
    crashed = a_run("a", "b", rounds=2)
    stage = crashed.restarted(recover="rewind")
    newer = ahead(crashed.holdings(), f0=5)
    stage.passes(0.1)
    assert stage.round.number == 2, "nobody is waited for"
    a, b = (stage.worker(name).comes_with(newer) for name in "ab")
    assert not a.asked_for + b.asked_for
    for number in range(2, 5):
        for place, puppet in enumerate((a, b)):
            base = newer[0].version if number == 2 else stage.version()  # type: ignore[union-attr]
            puppet.pushes(10 * number + place, base=base)
        assert stage.version().counter == number + 1
    assert stage.counted() == [stage.counted()[0]] * 2
    assert ("lost", 903) not in stage.counted()[0]
    assert max(stage.counted()[0].values()) == 1


def test_worker_that_waits_above_the_rewound_version_is_given_it_when_it_asks_again() -> None:
    crashed = a_run("a", rounds=2)
    stage = crashed.restarted(recover="rewind")
    stage.passes(0.1)
    a = stage.worker("a").comes_with(ahead(crashed.holdings(), f0=3))
    assert a.got(Welcome).versions == (stage.version(),)
    a.pulls(after=-1)
    assert a.holds() == crashed.version()


# Without any checkpoint.


def holding(counter: int, run: str = RUN, chunks: int = 2) -> Holdings:
    """One fragment at this version."""
    wires = tuple(Wire((("lost", counter),)) for _ in range(chunks))
    return (Held(VersionId(run, counter, 5_000 + counter), Ledger(), wires), None)


def in_pieces(*held: int, run: str = RUN, chunks: int = 2) -> Holdings:
    """Several fragments at these versions."""
    return (*(holding(each, run, chunks)[0] for each in held), None)


def pieces_stage(workers: int, pieces: int = 2) -> Stage:
    return Stage(
        a_config(workers, num_fragments=pieces, sync_every=12), layered(pieces, 2), resumption=None
    )


def test_newest_version_of_each_fragment_is_adopted_without_a_checkpoint() -> None:
    stage = pieces_stage(2)
    a = stage.worker("a").comes_with(in_pieces(3, 2))
    b = stage.worker("b").comes_with(in_pieces(2, 3))
    a.donates(0)
    b.donates(1)
    assert (a.asked_for, b.asked_for) == ([0], [1])
    assert counters(stage) == [3, 3]
    assert stage.round.number == 6
    assert stage.state.model.run == RUN
    assert_masters_are_what_is_handed_out(stage)


def test_donor_that_breaks_off_without_a_checkpoint_leaves_no_mixture_of_two_versions() -> None:
    stage = pieces_stage(2)
    a = stage.worker("a").comes_with(in_pieces(3, 2))
    new = stage.worker("new").joins()
    b = stage.worker("b").comes_with(in_pieces(2, 3))
    a.donates(0)
    a.donates(1)
    assert b.asked_for == [1]
    b.donates(1, [0])
    b.leaves()
    for fragment in a.asked_for[2:]:
        a.donates(fragment)
    for _ in range(11):
        a.beats()
        new.beats()
        stage.passes(1.0)
    assert counters(stage) == [3, 2]
    assert_masters_are_what_is_handed_out(stage)


def test_what_was_taken_of_donors_that_are_gone_is_gone_on_with() -> None:
    """The last one that holds a version leaves while the newest of a fragment is wanted of it."""
    stage = pieces_stage(2)
    new = stage.worker("new").joins()
    a = stage.worker("a").comes_with(in_pieces(3, 2))
    b = stage.worker("b").comes_with(in_pieces(2, 3))
    a.donates(0)
    a.donates(1)
    assert b.asked_for == [1]
    a.leaves()
    b.leaves()
    for _ in range(11):
        new.beats()
        stage.passes(1.0)
    assert counters(stage) == [3, 2]
    assert_masters_are_what_is_handed_out(stage)


def test_worker_of_an_older_run_does_not_hold_up_the_run_that_is_adopted() -> None:
    stage = a_stage(workers=3, chunks=2, min_workers=2)
    x = stage.worker("x").comes_with(holding(3, run="b" * 16))
    a, b = (stage.worker(name).comes_with(holding(12)) for name in "ab")
    a.donates()
    assert x.last(Rejoin) is not None
    x.comes_with(holding(3, run="b" * 16))
    assert x.error().code == "run_differs"
    stage.worker("c").comes_with(holding(12)).leaves()
    stage.passes(11.0)
    for place, puppet in enumerate((a, b), start=1):
        puppet.pushes(place, base=VersionId(RUN, 12, 5_012))
    assert stage.version().counter == 13


def test_run_that_lost_a_worker_and_its_broker_goes_on_with_those_that_are_left() -> None:
    """As after a restart from a checkpoint: round one's number of workers is no longer needed."""
    stage = a_stage(workers=3, chunks=2, recover_wait=5.0)
    a, b = (stage.worker(name).comes_with(holding(12)) for name in "ab")
    stage.passes(5.2)
    a.donates()
    stage.passes(5.2)
    for place, puppet in enumerate((a, b), start=1):
        puppet.pushes(place, base=VersionId(RUN, 12, 5_012))
    assert stage.version().counter == 13
