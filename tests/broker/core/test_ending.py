"""The end that a run's options set: the last round, the word to workers, and who is not waited for."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_broker.core.operations.ending import LAST_ROUND_S, LEAVE_WITHIN_S
from diloco_protocol.messages import Error, Message, Notice, Push, Released
from kit.core_harness import a_round, a_run, a_stage
from kit.restarts import a_saved_run, next_life

BOTH = pytest.mark.parametrize(
    "deterministic", [False, True], ids=["streaming", "whole submissions"]
)
PATIENT: dict[str, Any] = {"heartbeat_timeout": 0.0, "stall_timeout": 0.0, "min_workers": 1}


def test_the_last_round_is_announced_and_then_the_run_is_over() -> None:
    stage, workers = a_run("a", "b", rounds=2, max_rounds=3)
    stage.passes(0.2)
    assert "last_round" in workers[0].notices
    assert workers[0].got(Notice).round == 2
    a_round(workers, 2)
    assert all(worker.notices[-1] == "over" for worker in workers)
    assert not stage.ends
    for worker in workers:
        worker.leaves()
    stage.passes(0.2)
    assert [(end.is_complete, end.restarting) for end in stage.ends] == [(True, False)]
    stage.passes(1.0)
    assert len(stage.ends) == 1


def test_no_round_is_made_after_the_last_and_who_comes_then_is_told() -> None:
    stage, workers = a_run("a", "b", rounds=2, max_rounds=2)
    workers[0].sends(Push(workers[0].token(), 77, 0, 2, "bf16", base=stage.version()))
    assert workers[0].got(Error).code == "late"
    assert stage.version().counter == 2
    assert stage.shown()["end"]["is_over"]
    assert stage.joined("c")[0].notices[-1] == "over"


def test_workers_know_of_the_end_before_they_have_the_last_version() -> None:
    stage, (a,) = a_run("a", rounds=2, max_rounds=3)
    a.pulls(stage.version(0).counter, credit=50)
    a.pushes(91)
    told = [type(each) for each in a.all(Message) if isinstance(each, Notice | Released)]
    assert a.notices[-1] == "over"
    assert told[-2:] == [Notice, Released]


def test_a_worker_that_does_not_leave_is_waited_for_within_bounds() -> None:
    stage, (_, b) = a_run("a", "b", rounds=2, max_rounds=2, heartbeat_timeout=0.0)
    b.leaves()
    stage.passes(LEAVE_WITHIN_S - 1.0)
    assert not stage.ends
    stage.passes(1.5)
    assert stage.ends
    assert stage.said("no longer waiting for")


@BOTH
def test_the_last_round_is_made_of_what_is_whole_when_its_time_is_up(deterministic: bool) -> None:
    options = {"deterministic": deterministic, **PATIENT}
    stage, (a, b, c) = a_run("a", "b", "c", rounds=2, max_rounds=3, **options)
    stage.passes(0.2)
    a.pushes(91)
    b.begins(92)
    b.delivers([0])
    stage.passes(LAST_ROUND_S - 1.0)
    assert a.notices[-1] == "last_round"
    stage.passes(2.0)
    assert [worker.notices[-1] for worker in (a, b, c)] == ["over"] * 3
    assert all(chunk["a", 91] == 1 for chunk in stage.counted())
    assert a.last(Error) is None
    assert b.got(Error).push_id == 92  # nobody waits for it any more
    assert stage.said("closes without b, c")
    assert not stage.said("too few complete pushes")


def test_a_last_round_with_too_few_is_not_made() -> None:
    stage, (a, _) = a_run("a", "b", rounds=2, max_rounds=3, **PATIENT | {"min_workers": 2})
    stage.passes(0.2)
    a.pushes(91)
    stage.passes(LAST_ROUND_S + 1.0)
    assert a.notices[-1] == "over"
    assert a.got(Error).push_id == 91
    assert stage.version().counter == 2
    assert not stage.said("closes without")


@BOTH
@pytest.mark.parametrize("is_back", [False, True], ids=["has left", "has just come back"])
def test_whole_work_counts_in_the_last_round_whatever_its_worker_did_since(
    is_back: bool, deterministic: bool
) -> None:
    stage, (a, b) = a_run("a", "b", rounds=2, max_rounds=3, deterministic=deterministic, **PATIENT)
    stage.passes(0.2)
    a.pushes(91)
    if is_back:
        stage.passes(LAST_ROUND_S - 1.0)
        a.joins()  # and has not offered it again
    else:
        a.leaves()
    stage.passes(LAST_ROUND_S + 1.0)
    assert all(chunk["a", 91] == 1 for chunk in stage.counted())
    assert b.notices[-1] == "over"


def test_last_round_takes_what_has_come_and_is_not_looked_at_yet() -> None:
    stage, (a, b, c) = a_run("a", "b", "c", rounds=2, max_rounds=3, deterministic=True, **PATIENT)
    stage.passes(0.2)
    a.pushes(91)
    stage.passes(LAST_ROUND_S - 2.0)
    stage.by_hand = True
    b.pushes(92)
    stage.passes(4.0)
    stage.by_hand = False
    stage.work()
    stage.passes(1.0)
    assert all(chunk["a", 91] == chunk["b", 92] == 1 for chunk in stage.counted())
    assert c.notices[-1] == "over"


def test_upload_that_stands_still_gets_as_long_again_and_no_longer() -> None:
    stage, (a, b) = a_run("a", "b", rounds=2, max_rounds=3, **PATIENT)
    stage.passes(0.2)
    a.pushes(91)
    b.begins(92)
    b.delivers([0])
    stage.passes(2 * LAST_ROUND_S - 1.0)
    assert a.notices[-1] != "over"
    stage.passes(5.0)
    assert a.notices[-1] == "over"
    assert all(chunk["a", 91] == 1 for chunk in stage.counted())
    assert b.got(Error).push_id == 92


def test_each_fragment_of_the_last_cycle_has_the_time_that_a_round_takes() -> None:
    stage, (a, _) = a_run(
        "a", "b", rounds=0, max_rounds=4, num_fragments=2, sync_every=4, **PATIENT
    )
    for fragment in (0, 1):
        stage.passes(100.0)
        stage.pushes(fragment, a=11 + fragment, b=21 + fragment)
    stage.passes(100.0)
    a.pushes(15)
    while stage.counters[0] < 2:  # b hangs: its time must run out
        stage.passes(1.0)
    stage.passes(100.0)
    assert a.notices[-1] != "over"
    a.pushes(16, fragment=1)
    stage.passes(1000.0)
    assert stage.counters == [2, 2]


def test_round_that_closes_when_its_time_is_up_leaves_time_for_the_next_fragment() -> None:
    stage, (a, b) = a_run(
        "a", "b", rounds=2, max_rounds=4, num_fragments=2, sync_every=4, **PATIENT
    )
    stage.passes(0.2)
    a.pushes(31)
    b.begins(32)
    stage.passes(LAST_ROUND_S + 1.0)  # closing: both are at it
    b.completes()
    stage.passes(1.0)
    assert stage.counters == [2, 1]
    assert a.notices[-1] != "over"
    a.pushes(41, fragment=1)
    b.pushes(42, fragment=1)
    assert stage.counters == [2, 2]


@BOTH
def test_who_is_left_out_of_one_fragment_may_be_in_the_next(deterministic: bool) -> None:
    options = {"num_fragments": 2, "sync_every": 4, "deterministic": deterministic, **PATIENT}
    stage, (a, b) = a_run("a", "b", rounds=2, max_rounds=4, **options)
    stage.passes(0.2)
    a.pushes(31)
    b.begins(42, fragment=1)
    stage.passes(LAST_ROUND_S + 1.0)
    assert stage.counters == [2, 1]
    assert b.last(Error) is None
    b.completes()
    a.pushes(41, fragment=1)
    assert stage.counters == [2, 2]
    assert all(chunk["b", 42] == 1 for chunk in stage.counted(1))


def test_a_round_whose_length_nobody_knows_is_waited_for_like_any_other() -> None:
    stage = a_stage(2, max_rounds=1, heartbeat_timeout=0.0, stall_timeout=0.0)
    a, b = stage.joined("a", "b")
    stage.passes(0.2)
    assert a.notices[-1] == "last_round"
    stage.passes(20 * LAST_ROUND_S)
    a.pushes(1)
    b.pushes(2)
    assert a.notices[-1] == "over"
    assert stage.version().counter == 1


def test_the_end_can_be_put_off_after_it_was_announced() -> None:
    stage, workers = a_run("a", "b", rounds=2, max_rounds=3, heartbeat_timeout=0.0)
    stage.passes(0.2)
    assert stage.asks("set", max_rounds=4).ok
    a_round(workers, 2)
    assert "over" not in workers[0].notices
    stage.passes(0.2)
    assert workers[0].notices.count("last_round") == 2
    a_round(workers, 3)
    assert workers[0].notices[-1] == "over"


def test_time_without_workers_is_no_time_of_the_run() -> None:
    stage, (a,) = a_run("a", rounds=1, max_time="10m", heartbeat_timeout=0.0)
    a.leaves()
    stage.passes(3600.0)
    assert stage.state.totals.open_s < 2


def test_tokens_of_counted_work_end_the_run() -> None:
    stage, (a, b) = a_run("a", "b", rounds=1, token_budget=100)
    a.pushes(11, tokens=60)
    b.pushes(12, tokens=39)
    assert stage.shown()["totals"]["tokens"] == 99
    assert "over" not in a.notices
    a.pushes(21, tokens=1)
    b.pushes(22)
    assert a.notices[-1] == "over"


def test_time_ends_the_run_with_the_round_that_is_open() -> None:
    stage, (a, b) = a_run("a", "b", rounds=1, max_time="10m", heartbeat_timeout=0.0)
    stage.passes(620.0)
    assert a.notices[-1] == "last_round"
    a.pushes(11)
    b.pushes(12)
    assert a.notices[-1] == "over"
    assert stage.version().counter == 2


def test_asynchronous_pushes_are_counted_and_those_left_over_refused() -> None:
    stage = a_stage(2, mode="async", outer="nesterov", max_rounds=2)
    a, b = stage.joined("a", "b")
    b.begins(5)
    a.pushes(1)
    a.pushes(2)
    assert a.notices[-1] == "over"
    assert b.got(Error).push_id == 5
    assert b.notices[-1] == "over"


def test_fragments_all_end_with_the_same_steps() -> None:
    stage, (a, b) = a_run("a", "b", rounds=2, num_fragments=2, token_budget=10, sync_every=4)
    a.pushes(31, tokens=10)
    b.pushes(32)
    assert "over" not in a.notices
    a.pushes(41, fragment=1)
    b.pushes(42, fragment=1)
    assert a.notices[-1] == "over"
    assert stage.counters == [2, 2]


def test_a_restarted_broker_counts_on() -> None:
    crashed = a_saved_run("a", rounds=1, token_budget=100, max_time="1h", heartbeat_timeout=0.0)
    crashed.passes(1000.0)
    crashed.puppets["a"].pushes(11, tokens=60)
    counted_s = crashed.state.totals.open_s
    assert counted_s > 950
    later, (a,) = next_life(crashed, "a")
    assert (later.state.totals.tokens, later.state.totals.open_s) == (60, counted_s)
    a.pushes(21, tokens=40)
    assert a.notices[-1] == "over"
