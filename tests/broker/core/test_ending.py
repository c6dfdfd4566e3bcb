"""How far a run is, and the end that its options set: the last round, and who is not waited for."""

import math
from typing import Any

import pytest

from diloco_broker.core.operations.ending import LAST_ROUND_S
from diloco_protocol.messages import Error, Message, Notice, Progress, Push, Released
from diloco_protocol.ranges import MOST
from kit.core_harness import Puppet, a_round, a_run, a_stage, alone
from kit.restarts import a_saved_run, next_incarnation

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


def test_no_round_follows_the_last_and_late_workers_are_told() -> None:
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


@pytest.mark.parametrize(
    ("names", "deterministic", "deadlines"),
    [("abc", False, 1), ("abc", True, 1), ("ab", False, 2)],  # all are at it: as long again
)
def test_last_round_closes_with_complete_pushes_at_its_deadline(
    names: str, deterministic: bool, deadlines: int
) -> None:
    options = {"deterministic": deterministic, **PATIENT}
    stage, (a, b, *others) = a_run(*names, rounds=2, max_rounds=3, **options)
    stage.passes(0.2)
    a.pushes(91)
    b.begins(92)
    b.delivers([0])
    stage.passes(deadlines * LAST_ROUND_S - 1.0)
    assert a.notices[-1] == "last_round"
    stage.passes(2.0 * deadlines)
    assert {worker.notices[-1] for worker in (a, b, *others)} == {"over"}
    assert all(chunk["a", 91] == 1 for chunk in stage.counted())
    assert a.last(Error) is None
    assert b.got(Error).push_id == 92  # nobody waits for it any more
    assert bool(others) == bool(stage.said("closes without b, c"))
    assert not stage.said("too few complete pushes")


def test_last_round_below_the_floor_is_dropped() -> None:
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
def test_last_round_counts_the_push_of_a_lost_worker(is_back: bool, deterministic: bool) -> None:
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


def test_last_round_counts_received_pushes_not_inspected_yet() -> None:
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
    stage.pushes(1, a=41, b=42)
    assert stage.counters == [2, 2]


@BOTH
def test_worker_left_out_of_one_fragment_may_be_in_the_next(deterministic: bool) -> None:
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


def test_last_round_of_unknown_length_has_no_deadline() -> None:
    stage = a_stage(2, max_rounds=1, heartbeat_timeout=0.0, stall_timeout=0.0)
    a, _ = stage.joined("a", "b")
    stage.passes(0.2)
    assert a.notices[-1] == "last_round"
    stage.passes(20 * LAST_ROUND_S)
    stage.pushes(a=1, b=2)
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


def test_time_without_workers_is_not_counted() -> None:
    stage, (a,) = a_run("a", rounds=1, max_time="10m", heartbeat_timeout=0.0)
    a.leaves()
    stage.passes(3600.0)
    assert stage.shown()["totals"]["open_s"] < 2


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
    stage, (a, _) = a_run("a", "b", rounds=1, max_time="10m", heartbeat_timeout=0.0)
    stage.passes(620.0)
    assert a.notices[-1] == "last_round"
    stage.pushes(a=11, b=12)
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
    stage.pushes(1, a=41, b=42)
    assert a.notices[-1] == "over"
    assert stage.counters == [2, 2]


def test_totals_continue_after_a_restart() -> None:
    crashed = a_saved_run("a", rounds=1, token_budget=100, max_time="1h", heartbeat_timeout=0.0)
    crashed.passes(1000.0)
    crashed.puppets["a"].pushes(11, tokens=60)
    counted_s = crashed.shown()["end"]["seconds"]
    assert counted_s > 950
    later, (a,) = next_incarnation(crashed, "a")
    end = later.shown()["end"]
    assert (end["tokens"], end["seconds"]) == (60, counted_s)
    a.pushes(21, tokens=40)
    assert a.notices[-1] == "over"


# How far the run is, as workers are told with each version.


def told(puppet: Puppet) -> Progress:
    progress = puppet.got(Released).progress
    assert progress is not None
    return progress


def pushes_and_pulls(number: int, *puppets: Puppet, steps: int = 100, **fields: Any) -> None:
    for place, puppet in enumerate(puppets):
        puppet.pushes(10 * number + place, steps=steps, **fields)
    for puppet in puppets:
        puppet.pulls()


def test_each_version_tells_rounds_steps_and_the_tokens_of_all() -> None:
    stage, (a, b) = a_run("a", "b", rounds=0)
    pushes_and_pulls(1, a, b, tokens=50)
    assert told(a) == told(b) == Progress(rounds=1, steps=100, tokens=100)
    pushes_and_pulls(2, a, b, tokens=50)
    assert told(a) == Progress(rounds=2, steps=200, tokens=200)
    assert told(a).fraction is None, "it has no end"
    (late,) = stage.joined("late")
    late.pulls()
    assert told(late) == told(a), "before its first step"


def test_steps_of_a_round_are_the_median_of_its_workers() -> None:
    stage = a_stage(workers=3)
    slow, usual, liar = stage.joined("slow", "usual", "liar")
    for number, (puppet, steps) in enumerate([(slow, 30), (usual, 100), (liar, MOST)]):
        puppet.pushes(number, steps=steps)
    usual.pulls()
    assert told(usual).steps == 100


def test_fragments_are_pushed_for_the_same_steps_which_count_once() -> None:
    stage = a_stage(workers=1, num_fragments=2)
    (a,) = stage.joined("a")
    for number in range(4):
        a.pushes(number, fragment=number % 2, steps=100, tokens=10)
    a.pulls(fragment=1)
    assert told(a) == Progress(rounds=4, steps=200, tokens=20)


def test_asynchronous_workers_share_the_steps() -> None:
    _, (a, b) = a_run("a", "b", rounds=0, mode="async")
    a.pushes(1, steps=100, tokens=5)
    b.pushes(2, steps=100, tokens=5)
    b.pulls()
    assert told(b) == Progress(rounds=2, steps=100, tokens=10)


def test_loss_is_the_mean_of_reported_finite_losses() -> None:
    _, (a, b) = a_run("a", "b", rounds=0)
    a.pushes(1, loss=2.0)
    b.pushes(2, loss=4.0)
    a.pulls()
    assert a.got(Released).loss == 3.0
    for number, loss in enumerate([None, math.nan, math.inf], start=2):
        pushes_and_pulls(number, a, b, loss=loss)
        assert a.got(Released).loss is None


def test_claims_without_bound_end_nothing() -> None:
    """Totals stay what a message and a checkpoint can hold."""
    stage, a = alone()
    for number in range(3):
        a.pushes(number, steps=MOST, tokens=MOST)
    a.pulls()
    assert told(a) == Progress(rounds=3, steps=MOST, tokens=MOST)
    assert stage.shown()["totals"]["tokens"] == MOST


def test_progress_is_measured_to_the_nearest_limit() -> None:
    _, (a, b) = a_run("a", "b", rounds=0, max_rounds=4, token_budget=1000)
    pushes_and_pulls(1, a, b, tokens=50)
    progress = told(a)
    assert (progress.max_rounds, progress.token_budget, progress.max_seconds) == (4, 1000, None)
    assert progress.fraction == 0.25
    pushes_and_pulls(2, a, b, tokens=400)
    assert told(a).fraction == 0.9
