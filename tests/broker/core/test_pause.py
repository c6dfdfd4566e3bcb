"""A broker that did not run for a while: its process was stopped, or its machine slept.

Deadlines run on the time in which it served (those of the run itself: `test_held`), and workers whose
connections broke have time to come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diloco_broker.core.events import Received, Surroundings, Tick
from diloco_broker.core.members.admission import CONTEST_S
from diloco_broker.core.members.liveness import BACK_WITHIN_S
from diloco_broker.shell.served_time import COUNTED_S, LONGEST_S, WORTH_SAYING_S, ServedTime
from diloco_protocol.messages import Error, Join
from kit.core_harness import Puppet, Stage, a_run
from kit.heartbeats import Beating
from kit.restarts import a_saved_run

# A night in which the machine slept.
LONG_S = 30_000.0

Deadline = tuple[Stage, Callable[[], object], float]


def silence() -> Deadline:
    stage, _ = a_run("a", heartbeat_timeout=30.0)
    return stage, lambda: "a" not in stage.here, 30.0


def broken_connection() -> Deadline:
    stage, (a, _) = a_run("a", "b", disconnect_grace=20.0)
    a.loses_connection()
    return stage, lambda: "a" not in stage.here, 20.0


def training_loop_that_hangs() -> Deadline:
    stage, _ = a_run("a", "b", stall_timeout=60.0)
    beating = Beating(stage)
    for name in "ab":
        beating.beats(name)

    def has_stalled() -> bool:
        beating.beats("a")
        beating.beats("b", "standing")
        return bool(stage.expected == {"a"})

    return stage, has_stalled, 60.0


def workers_of_the_run_before() -> Deadline:
    crashed = a_saved_run("a", "b", rounds=1)
    stage = crashed.restarted(recover_wait=20.0)
    stage.passes(20.1)
    a = stage.worker("a").comes_with(crashed.holdings())
    a.pushes(11)
    return stage, lambda: stage.version().counter == 2, 20.0


def answer_of_a_worker_whose_name_another_one_wants() -> Deadline:
    stage, (a,) = a_run("a", heartbeat_timeout=0.0)
    route = stage.route()
    stage.happens(Received(route, Join("a", stage.manifest)))
    stage.passes(0.2)
    a.beats()

    def is_forgotten() -> bool:
        stage.happens(Received(route, Join("a", stage.manifest)))
        error = stage.inbox[route][-1]
        assert isinstance(error, Error)
        return error.retry

    return stage, is_forgotten, CONTEST_S


DEADLINES = (
    silence,
    broken_connection,
    training_loop_that_hangs,
    workers_of_the_run_before,
    answer_of_a_worker_whose_name_another_one_wants,
)


@pytest.mark.parametrize("deadline", DEADLINES, ids=lambda d: d.__name__)
def test_time_in_which_the_broker_did_not_run_counts_against_nobody(
    deadline: Callable[[], Deadline],
) -> None:
    for short_of_it in (2.0, -1.0):
        stage, is_over, seconds = deadline()
        stage.passes(seconds / 2)
        stage.stands_still(LONG_S)
        stage.passes(seconds / 2 - short_of_it)
        assert is_over() == (short_of_it < 0)


@pytest.mark.parametrize("heartbeat_timeout", [120.0, 2.0, 0.0])
def test_round_does_not_close_without_those_whose_connections_broke_meanwhile(
    heartbeat_timeout: float,
) -> None:
    """They notice the silence, open new connections, and may wait 2 s between two attempts."""
    stage, (a, b) = a_run("a", "b", disconnect_grace=0.0, heartbeat_timeout=heartbeat_timeout)
    a.pushes(11)
    for puppet in (a, b):
        stage.gone |= {puppet.control, puppet.bulk}
    stage.stands_still(60.0)
    stage.happens(Tick(lost=True))
    stage.passes(BACK_WITHIN_S - 1)
    for puppet in (a, b):
        puppet.joins()
    for _ in range(5):
        stage.passes(1.0)
        for puppet in (a, b):
            puppet.beats()
    assert stage.expected == {"a", "b"}
    b.pushes(12)
    assert stage.version().counter == 2
    assert stage.reports[-1].averaged == 2
    assert stage.said("suspended for 60 s")


def test_worker_that_died_meanwhile_is_not_waited_for_longer_than_a_return_takes() -> None:
    stage, (a, b) = a_run("a", "b")
    a.pushes(11)
    stage.gone |= {b.control, b.bulk}
    stage.stands_still(60.0)
    stage.happens(Tick(lost=True))
    a.beats()
    stage.passes(BACK_WITHIN_S + 0.2)
    assert stage.version().counter == 2
    b_again = Puppet(stage, "c").joins()
    stage.passes(1.0)
    b_again.loses_connection()
    stage.passes(stage.config.disconnect_grace + 0.2)
    assert "c" not in stage.here, "later the grace is what it always is"


@pytest.mark.parametrize("has_own_optimizer", [False, True])
def test_long_step_of_a_torch_optimizer_is_named_where_it_can_be_the_cause(
    has_own_optimizer: bool,
) -> None:
    stage, _ = a_run("a")
    stage.happens(Surroundings(has_own_optimizer=has_own_optimizer))
    stage.stands_still(7.0)
    (text,) = stage.said("suspended")
    assert ("a step of its torch optimizer took that long" in text) == has_own_optimizer


@pytest.mark.parametrize("step", [0.0, 0.001, 0.1, LONGEST_S])
def test_clock_runs_as_the_machine_s_while_the_broker_serves(step: float) -> None:
    now = 50.0
    clock = ServedTime(lambda: now)
    for _ in range(100):
        now += step
        assert clock() == now
    assert clock.stood_still() == 0


@pytest.mark.parametrize("gap", [0.6, 3.0, 1e9])
def test_clock_leaves_out_what_no_turn_takes(gap: float) -> None:
    now = 50.0
    clock = ServedTime(lambda: now)
    now += gap
    assert clock() == pytest.approx(50.0 + COUNTED_S)
    told: Any = clock.stood_still()
    assert told == (pytest.approx(gap - COUNTED_S) if gap > WORTH_SAYING_S else 0)
    assert clock.stood_still() == 0, "it is said once"
    now += 0.1
    assert clock() == pytest.approx(50.1 + COUNTED_S)
