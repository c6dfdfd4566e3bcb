"""Asynchronous mode: no barrier, slots, staleness, grace periods, Dynamic Local Updates."""

import math
from functools import partial
from typing import Any

import pytest

from diloco_broker.core.members.dylu import average_speed, sync_every
from diloco_protocol.messages import Grant, Heartbeat, Notice, Released, Standing, Welcome
from kit import core_harness
from kit.core_harness import Puppet, Stage, alone

a_run = partial(core_harness.a_run, rounds=0, chunks=3, mode="async")


def b_is_late(by: int, **fields: Any) -> tuple[Stage, Puppet]:
    """a has pushed `by` times; b has not, and is still at the first version."""
    stage, (a, b) = a_run("a", "b", **fields)
    b.base = stage.version()
    for number in range(by):
        a.pushes(10 + number, base=stage.version())
    return stage, b


def standings(worker: Puppet, push_id: int) -> list[Standing]:
    return [grant.standing for grant in worker.all(Grant) if grant.push_id == push_id]


def test_push_is_applied_at_once_and_its_sender_gets_the_version() -> None:
    stage, (a, _) = a_run("a", "b")
    a.pulls(after=0)
    a.pushes(1)
    assert stage.version().counter == 1
    released = a.got(Released)
    assert (released.version.counter, released.staleness) == (1, 0)
    assert released.ledger.names_whole("a", 1)
    assert a.holds() == stage.version()
    assert a.offers(1).standing is Standing.COUNTED
    a.commits()
    assert stage.version().counter == 1
    assert all(chunk["a", 1] == 1 for chunk in stage.counted())


def seen_by(worker: Puppet) -> list[int]:
    """The versions that it was told of, after the one at joining."""
    return [released.version.counter for released in worker.all(Released)][1:]


def test_worker_with_a_push_in_flight_is_not_sent_versions_of_others() -> None:
    stage, b = b_is_late(3)
    b.offers(1)
    b.pulls(after=0, credit=16)
    assert seen_by(b) == []
    stage.pushes(a=20)  # which b follows: it may be the one with its push
    b.completes()
    assert seen_by(b) == [4]  # that of a, which it had begun with
    b.pulls(after=4, credit=16)
    assert seen_by(b) == [4, 5]
    assert stage.version().counter == 5
    assert b.got(Released).ledger.names_whole("b", 1)


def test_worker_without_a_push_in_flight_gets_the_newest_version() -> None:
    stage, b = b_is_late(3)
    b.pulls(after=0)
    assert seen_by(b) == [3]
    b.pushes(1, base=stage.version())
    b.pulls(after=0)  # its push is in the current version
    assert seen_by(b)[-1] == 4
    b.offers(2)
    b.pulls(after=-1)  # and who asks for any version gets one
    assert seen_by(b)[-1] == 4 and len(seen_by(b)) == 3


def test_stale_push_counts_less_with_poly_weights() -> None:
    stage, b = b_is_late(3, staleness_weight="poly")
    base = b.base
    b.pulls(after=3)
    b.pushes(1, base=base)
    assert stage.row("b")["staleness"] == 3
    assert stage.reports[-1].staleness == 3
    assert b.got(Released).staleness == 3
    scales = [m.groups[0][0].scale for m in stage.tensors.merges if not m.index]
    assert scales == [1.0, 1.0, 1.0, 0.5]


def test_stale_push_counts_less_with_cgad_up_to_its_cutoff() -> None:
    stage, b = b_is_late(3, outer="cgad", cgad_decay=0.2)
    b.pushes(1)
    a, newest = stage.puppets["a"], stage.version()
    for number in range(9):
        a.pushes(20 + number, base=newest)
    scales = [m.groups[0][0].scale for m in stage.tensors.merges if not m.index]
    # The cutoff is 4 times the workers: 8 versions.
    wanted = [math.exp(-0.2 * s) * (1 + math.cos(math.pi * s / 8)) / 2 for s in range(9)]
    assert scales == pytest.approx([1.0, 1.0, 1.0, wanted[3], *wanted])
    assert scales[-1] == 0.0


def test_push_that_is_or_becomes_too_stale_is_refused() -> None:
    stage, (a, b) = a_run("a", "b", max_staleness=1)
    b.begins(1)
    b.delivers([0, 1])
    for number in range(2):
        a.pushes(10 + number, base=stage.version())
    b.completes(2)
    assert (b.error().code, b.error().push_id) == ("stale", 1)
    assert stage.merged == ["a", "a"]
    b.begins(2)
    assert (b.error().code, b.error().push_id) == ("stale", 2), "when it is offered"


def test_push_that_becomes_too_stale_while_it_waits_is_refused() -> None:
    stage, (a, b) = a_run("a", "b", max_staleness=0, staging_slots=1)
    a.begins(1)
    b.begins(2)
    a.completes()
    assert (b.error().code, b.error().push_id) == ("stale", 2)
    assert stage.shown()["reducer"]["submissions"] == 0


def test_slots_are_handed_out_in_the_order_of_asking_and_the_dead_are_passed_over() -> None:
    _, puppets = a_run("a", "b", "c", "d", "e", "f", staging_slots=2)
    a, b, c, d, e, f = puppets
    granted = [each.offers(number).standing for number, each in enumerate(puppets, start=1)]
    assert granted == [Standing.NEW] * 2 + [Standing.WAIT] * 4
    b.completes()
    assert c.got(Grant).standing is Standing.NEW
    assert standings(d, 4) == [Standing.WAIT]
    d.dies()
    a.leaves()
    assert e.got(Grant).standing is Standing.NEW
    assert standings(f, 6) == [Standing.WAIT]
    e.delivers([0], is_finite=False)
    assert f.got(Grant).standing is Standing.NEW


def test_slot_without_progress_goes_to_the_next_in_line_and_is_given_again() -> None:
    stage, (a, b) = a_run("a", "b", staging_slots=1, staging_deadline=10.0)
    a.begins(1)
    stage.passes(60.0)  # no other push waits
    a.delivers([0])
    b.begins(2)
    stage.passes(9.0)
    assert standings(b, 2) == [Standing.WAIT]
    stage.passes(2.0)
    assert standings(b, 2) == [Standing.WAIT, Standing.NEW]
    assert standings(a, 1) == [Standing.NEW, Standing.WAIT]
    a.delivers([1])  # under way when its slot was taken: ignored
    b.completes()
    assert (a.got(Grant).standing, a.got(Grant).held) == (Standing.NEW, None)
    a.completes()
    assert stage.merged == ["b", "a"]


def test_grace_window_applies_its_pushes_together() -> None:
    stage, (a, b, c) = a_run("a", "b", "c", grace=2.0, staging_slots=1)
    for puppet in (a, b, c):
        puppet.pulls(after=0)
    a.pushes(1)
    stage.passes(1.0)
    b.pushes(2)
    assert stage.version().counter == 0
    stage.passes(1.2)
    assert stage.merged == ["ab"]
    assert {p.got(Released).version for p in (a, b)} == {stage.version()}
    assert stage.shown()["fragments"][0]["gradients"] == 2


def test_window_holds_one_push_of_each_worker_and_fragment() -> None:
    stage, (a, b) = a_run("a", "b", grace=100.0, staging_slots=2)
    a.pushes(1)
    for push_id in range(2, 50):
        assert a.offers(push_id).standing is Standing.WAIT
    b.pushes(100)
    reducer = stage.shown()["reducer"]
    assert (reducer["submissions"], reducer["waiting"]) == (2, 1)
    stage.passes(101.0)
    assert (a.got(Grant).push_id, a.got(Grant).standing) == (49, Standing.NEW)


@pytest.mark.parametrize(
    ("option", "runs", "asked"),
    [
        *(("num_fragments", 2, 3), ("dylu", False, True)),
        *(("fragment_sync_delay", "auto", 0), ("fragment_sync_delay", 2, "auto")),
    ],
)
def test_worker_with_other_options_is_refused(option: str, runs: object, asked: object) -> None:
    options: dict[str, Any] = {"num_fragments": 2, "sync_every": 10, option: runs}
    stage, _ = a_run("a", "b", **options)
    error = stage.worker("c").joins(wants={option: asked}).error()
    assert (error.code, option in error.text) == ("config_differs", True)
    assert stage.worker("d").joins(wants={option: runs}).last(Welcome) is not None


def test_fragments_are_applied_in_any_order_and_a_joiner_is_told_with_which_to_begin() -> None:
    stage, (a, b) = a_run("a", "b", num_fragments=2, sync_every=10)
    a.pushes(1, fragment=1)
    welcome = stage.worker("c").joins().got(Welcome)
    assert (welcome.first_round, welcome.plan) == (1, (0, 1))
    b.pushes(2, fragment=0)
    b.pushes(3, fragment=1)
    assert stage.counters == [1, 2]
    assert stage.round.number == 3


def test_heartbeats_are_answered_with_the_steps_that_fit_the_speed() -> None:
    _, (a, b) = a_run("a", "b", dylu=True, sync_every=100, dylu_min_steps=10)

    def answer(puppet: Puppet, speed: float | None) -> int | None:
        puppet.sends(Heartbeat(puppet.token(), 1, steps_per_s=speed))
        return puppet.got(Notice).sync_every

    assert answer(a, 4.0) == 100
    assert answer(b, 1.0) == 25
    assert answer(b, 0.5) == 16  # 1.5 seconds a step on the average, against 0.25
    assert answer(b, 0.001) == 10
    assert answer(a, 4.0) == 100
    a.dies()
    assert answer(b, 0.5) == 100, "the dead leave the fastest speed"


def test_steps_are_floored_bounded_and_independent_of_rounding() -> None:
    assert sync_every({"a": 0.58, "b": 0.29}, "b", 100, 1) == 50
    assert sync_every({"a": 3.0, "b": 1.0}, "b", 10, 1) == 3
    assert sync_every({"a": 3.0, "b": 0.01}, "b", 10, 4) == 4
    assert sync_every({"a": 3.0}, "b", 10, 4) == 10
    assert average_speed(None, 3.0) == 3.0
    assert average_speed(3.0, 1.0) == pytest.approx(1.5)  # 1/3 and 1 second a step
    assert average_speed(3.0, float("nan")) == 3.0
    assert average_speed(3.0, None) == 3.0
    absurd = average_speed(1.0, 1e12)
    for _ in range(3):
        absurd = average_speed(absurd, 1.0)
    assert absurd is not None and absurd < 1.1, "one odd report is soon forgotten"


def test_hundreds_of_versions_a_minute_have_a_line_a_second() -> None:
    stage, (a, b) = a_run("a", "b", num_fragments=2, sync_every=8)
    bases = [stage.version(fragment) for fragment in range(2)]
    for push_id in range(1, 31):
        fragment = push_id % 2
        if push_id % 10:
            a.pushes(push_id, fragment=fragment, base=stage.version(fragment))
        else:
            b.pushes(push_id, fragment=fragment, base=bases[fragment])
        stage.now += 0.125
    told = stage.said("contain")
    assert len(told) == 4
    assert "of a (0 versions old)" in told[0]
    assert told[1].startswith("8 versions") and "a, b, at most" in told[2]
    stage.passes(6.0)
    assert len(stage.said("contain")) == 5, "nothing is told twice"


@pytest.mark.parametrize(
    "fields",
    [{"mode": "async"}, {}, {"deterministic": True}, {"num_fragments": 2, "sync_every": 8}],
    ids=str,
)
def test_worker_that_learns_nothing_is_named_once_until_it_moves(fields: dict[str, Any]) -> None:
    stage, a = alone(**fields)
    pieces, told = stage.config.num_fragments, []
    for turn, norm in enumerate([0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]):
        for fragment in range(pieces):
            length = 1.0 if fragment else norm
            push_id = 10 * turn + fragment + 1
            base = stage.version(fragment)
            a.begins(push_id, fragment=fragment, base=base, steps=5, norm=length)
            a.pushes(push_id, fragment=fragment, base=base, steps=5, norm=length)  # comes again
        told.append(len(stage.said("all zeros")))
    assert told == [0, 0, 0, 1, 1, 1, 1, 2]
    (line, _) = stage.said("all zeros", "5 steps")
    assert ("fragment 0" in line) == (pieces > 1)
    for push_id in range(101, 105):  # of no steps
        a.pushes(push_id, base=stage.version(), norm=0.0)
        for fragment in range(1, pieces):
            a.pushes(push_id + 10, fragment=fragment, base=stage.version(fragment))
    assert len(stage.said("all zeros")) == 2
