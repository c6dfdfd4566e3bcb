"""A relay's site sends its rounds up, one push of each fragment at a time, and goes on meanwhile."""

from __future__ import annotations

from typing import Any

from diloco_broker.core import effects, events
from diloco_protocol.messages import Error, Heartbeat, Notice, Rejoin, Standing, Welcome
from kit.core_harness import Puppet, Stage, a_stage
from kit.site_stage import UP, a_site, closes, flights, passes


def carried(worker: Puppet) -> list[tuple[int | None, int | None]]:
    """Fragment and round of each push of it that it was told to be carried."""
    return [(n.fragment, n.round) for n in worker.all(Notice) if n.what == "carried"]


def closing(stage: Stage) -> list[int]:
    """The pushes of the update that is being averaged, by id."""
    found = stage.state.closing
    return [] if found is None else [each.push.push_id for each in found.pushes]


def up_with_both(**fields: Any) -> tuple[Stage, list[Puppet]]:
    """A site of two fragments has sent the first one up."""
    stage, (a, b) = a_site("a", "b", num_fragments=2, **fields)
    a.pushes(1)
    b.pushes(2)
    closes(stage)
    return stage, [a, b]


# Rounds.


def test_next_round_opens_when_the_mean_has_gone_up() -> None:
    stage, (a, b) = up_with_both()
    assert (stage.round.number, stage.round.fragment, stage.counters) == (1, 1, [0, 0])
    assert stage.expected == {"a", "b"}
    a.pushes(3, fragment=1)
    b.pushes(4, fragment=1)
    closes(stage, UP + 1)
    assert sorted(flights(stage)) == [0, 1]


def test_version_of_a_later_fragment_may_come_first() -> None:
    stage, (a, b) = up_with_both()
    a.pushes(3, fragment=1)
    b.pushes(4, fragment=1)
    closes(stage, UP + 1)
    passes(stage, 1, fragment=1, up=UP + 1, a=3, b=4)
    assert stage.counters == [0, 1]
    assert sorted(flights(stage)) == [0]
    passes(stage, 1, fragment=0, a=1, b=2)
    assert stage.counters == [1, 1]
    assert not flights(stage)


def test_push_of_a_fragment_waits_until_the_one_before_it_is_in_a_version() -> None:
    stage, (a,) = a_site("a")
    a.pushes(1)
    closes(stage)
    a.pushes(2)
    stage.work()
    assert closing(stage) == []
    passes(stage, 1, a=1)
    assert closing(stage) == [2]


def test_push_that_is_offered_again_while_it_is_up_is_whole() -> None:
    stage, (a,) = a_site("a")
    a.pushes(1)
    closes(stage)
    grant = a.offers(1)
    assert (grant.standing, grant.held) == (Standing.RESUME, b"\x03")
    assert grant.round == 0


def test_worker_that_joins_while_nobody_has_begun_is_expected_in_the_open_round() -> None:
    stage, _ = up_with_both()
    late = stage.worker("late").joins()
    assert late.got(Welcome).first_round == 1
    assert "late" in stage.expected


def test_dead_worker_s_push_that_is_up_counts() -> None:
    stage, (_, b) = up_with_both()
    stage.kicks("a")
    passes(stage, 1, a=1, b=2)
    b.pulls(0)
    assert stage.counters == [1, 0]


# The parent is elsewhere in the sequence.


def test_workers_are_told_that_the_parent_has_their_push_in_a_later_round() -> None:
    stage, workers = up_with_both()
    stage.happens_by_hand(events.RoundNamed(0, UP, 4))
    assert [carried(each) for each in workers] == [[(0, 4)], [(0, 4)]]
    assert stage.round.number == 3  # the round before is closing at the parent
    stage.happens_by_hand(events.RoundNamed(0, UP, 4))
    assert [len(carried(each)) for each in workers] == [1, 1]


def test_what_came_for_a_round_that_is_over_at_the_parent_is_carried() -> None:
    stage, (a, b) = up_with_both()
    a.pushes(3, fragment=1)
    stage.work()
    stage.happens_by_hand(events.RoundNamed(0, UP, 6))
    assert stage.round.number == 5
    assert carried(a) == [(0, 6), (1, 5)]
    b.pushes(4, fragment=1)
    assert closes(stage, UP + 1).contents == {"a": 3, "b": 4}
    assert sorted(flights(stage)) == [0, 1]


def test_round_does_not_wait_for_ever_for_a_worker_whose_push_is_for_a_later_one() -> None:
    stage, (a, b) = up_with_both(stall_timeout=30.0, heartbeat_timeout=0.0)
    passes(stage, 1, a=1, b=2)
    a.pushes(3, fragment=1)
    b.pushes(4)  # of the round after this one
    stage.work()
    stage.passes(29.0)
    assert stage.state.closing is None, "it may be on its way"
    stage.passes(2.0)
    assert closes(stage, UP + 1).contents == {"a": 3}
    assert stage.round.number == 2


def test_round_that_nobody_will_send_for_is_left_to_the_next() -> None:
    stage, (a, b) = a_site("a", "b", num_fragments=2, stall_timeout=30.0, heartbeat_timeout=0.0)
    a.pushes(1, fragment=1)
    b.pushes(2, fragment=1)
    stage.work()
    stage.passes(31.0)
    assert closes(stage).contents == {"a": 1, "b": 2}
    assert stage.round.number == 2


def test_version_made_without_the_site_is_the_newest_and_its_round_is_over() -> None:
    stage, (a, b) = a_site("a", "b", num_fragments=2)
    a.pushes(1)
    stage.work()
    passes(stage, 1, up=None, elsewhere=7)
    assert (stage.counters, stage.round.number) == ([1, 0], 1)
    assert carried(a) == [(0, 2)]
    newcomer = stage.worker("c").joins()
    newcomer.pulls(0)
    assert newcomer.holds() == stage.version()
    assert not carried(b)


def test_worker_whose_push_was_counted_elsewhere_is_not_waited_for_in_its_round() -> None:
    stage, (a, b) = up_with_both()
    a.pushes(3, fragment=1)
    b.pushes(4, fragment=1)
    closes(stage, UP + 1)
    a.pushes(5)  # of the first fragment again, in round 2
    stage.work()
    passes(stage, 1, a=5, b=2)  # the parent has another way to it
    assert stage.round.number == 2
    assert stage.round.missing == {"b"}


def test_parent_that_needs_a_round_which_was_left_out_gets_it() -> None:
    stage, (a, b) = up_with_both()
    stage.happens_by_hand(events.RoundNamed(0, UP, 6))
    assert stage.round.number == 5
    stage.happens_by_hand(events.ExpectedFrom(3))
    assert (stage.round.number, stage.round.fragment) == (3, 1)
    assert a.all(Rejoin) and b.all(Rejoin)
    assert sorted(flights(stage)) == [0]


def test_rounds_that_the_parent_does_not_need_the_site_in_are_left_out() -> None:
    stage, (a, b) = a_site("a", "b", num_fragments=2)
    a.pushes(1)
    stage.work()
    stage.happens_by_hand(events.ExpectedFrom(5))
    assert stage.round.number == 5
    assert carried(a) == [(0, 6)]
    assert not b.all(Rejoin)


# Refused.


def test_what_is_left_of_a_refused_push_goes_up_again() -> None:
    stage, (a, b) = up_with_both()
    passes(stage, 1, up=None, a=1)
    stage.happens_by_hand(events.TurnedDown(0, UP, "contained", "a part is counted"))
    assert not flights(stage)
    left = [each.push.push_id for each in stage.state.submissions]
    assert left == [2]
    assert carried(b)[-1] == (0, 2)
    assert not [*a.all(Error), *b.all(Error)]


def test_workers_hear_why_their_push_was_refused() -> None:
    stage, workers = up_with_both()
    stage.happens_by_hand(events.TurnedDown(0, UP, "late", "it came too late"))
    assert [each.error().code for each in workers] == ["late", "late"]
    assert not list(stage.state.submissions)


def test_reason_of_a_newer_parent_s_that_is_not_known_here_is_no_end() -> None:
    stage, workers = up_with_both()
    stage.happens_by_hand(events.TurnedDown(0, UP, "of_another_age", "it does not fit"))
    assert [each.error().code for each in workers] == ["stale", "stale"]
    assert workers[0].error().text == "it does not fit"


def test_only_the_oldest_of_a_window_is_refused_as_too_old() -> None:
    stage, (a, b) = a_site("a", "b", mode="async", grace=1.0)
    old = stage.version()
    a.pushes(1)
    b.pushes(2)
    stage.work()
    stage.passes(2.0)
    closes(stage)
    passes(stage, 1, a=1, b=2)
    a.pushes(3, base=old)
    b.pushes(4, base=stage.version())
    stage.work()
    stage.passes(2.0)
    closes(stage, UP + 1)
    stage.happens_by_hand(events.TurnedDown(0, UP + 1, "stale", "it is too old"))
    assert a.error().code == "stale"
    assert closing(stage) == [4]


# Asynchronous mode.


def test_update_waits_while_one_of_its_fragment_is_up() -> None:
    stage, (a, b) = a_site("a", "b", mode="async")
    a.pushes(1)
    closes(stage)
    b.pushes(2)
    stage.work()
    assert closing(stage) == []
    passes(stage, 1, a=1)
    assert closing(stage) == [2]


def test_what_has_gone_up_leaves_its_slot() -> None:
    stage, (a, b, c) = a_site("a", "b", "c", mode="async", staging_slots=1)
    a.pushes(1)
    closes(stage)
    assert b.offers(2).standing is Standing.NEW
    assert c.offers(3).standing is Standing.WAIT


def test_push_of_a_relay_is_as_many_gradients_as_workers_are_in_it() -> None:
    stage = a_stage(workers=4, mode="async", relays=True, chunks=2)
    north, a = stage.worker("north").joins(workers=3), stage.worker("a").joins()
    stage.provide()
    stage.by_hand = True
    north.pushes(1, contents={"x": 1, "y": 2, "z": 3}, workers=3)
    while isinstance(stage.tensors.queue[0], effects.Inspect):
        stage.work(1)
    merge = stage.tensors.queue[0]
    assert isinstance(merge, effects.AggregateAndStep)
    assert [[part.worker_id for part in group] for group in merge.groups] == [["north"]] * 3
    stage.work()
    assert stage.shown()["fragments"][0]["gradients"] == 3
    a.pushes(2)
    stage.work()
    assert stage.shown()["fragments"][0]["gradients"] == 4


def test_site_s_fastest_worker_makes_the_steps_that_the_parent_asks_for() -> None:
    stage, (a, b) = a_site("a", "b", mode="async", dylu=True, sync_every=100)
    stage.happens_by_hand(events.Paced(60))
    for worker, speed in ((a, 4.0), (b, 1.0)) * 2:
        worker.sends(Heartbeat(worker.token(), 1, steps_per_s=speed))
    assert [each.got(Notice).sync_every for each in (a, b)] == [60, 15]
