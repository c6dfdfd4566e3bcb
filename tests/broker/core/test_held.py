"""A run that is held by a pause, without a lease, or with its broker: its deadlines stand still."""

from collections.abc import Callable
from typing import Any

import pytest

from diloco_broker.core.events import Received, Surroundings, Tick
from diloco_broker.core.members.admission import CONTEST_S
from diloco_broker.core.members.liveness import BACK_WITHIN_S
from diloco_broker.core.members.start import SEED_PATIENCE_S
from diloco_broker.core.operations.ending import LAST_ROUND_S, LEAVE_WITHIN_S
from diloco_broker.shell.served_time import COUNTED_S, LONGEST_S, WORTH_SAYING_S, ServedTime
from diloco_protocol.messages import Error, Grant, Join, Lease, Promise, Standing
from kit import core_harness
from kit.core_harness import Puppet, Stage, a_round, a_run
from kit.heartbeats import Beating
from kit.restarts import a_saved_run, holding

# How long the run goes on before it is held, and for how long it is.
BEFORE_S = 10.0
HELD_S = 150.0
# Silence is not a deadline of the run, so these timeouts are off.
USUAL: dict[str, Any] = {"chunks": 2, "heartbeat_timeout": 0.0, "stall_timeout": 0.0}


STANDBY = b"standby"
Deadline = tuple[Stage, Callable[[], object], float]


def is_paused(stage: Stage) -> None:
    stage.asks("pause")
    stage.passes(HELD_S)
    stage.asks("resume")


def stands_still(stage: Stage) -> None:
    """The broker's process is stopped, or its machine sleeps for a night."""
    stage.stands_still(30_000.0)


def a_stage(**options: Any) -> Stage:
    return core_harness.a_stage(**(USUAL | options))


def time_of_the_last_round() -> Deadline:
    stage = a_stage(max_rounds=2)
    a, b = stage.joined("a", "b")
    a_round([a, b], 0)
    a.pushes(11)
    return stage, lambda: "over" in b.notices, LAST_ROUND_S


def time_to_leave() -> Deadline:
    stage = a_stage(max_rounds=1)
    a_round(stage.joined("a", "b"), 0)
    return stage, lambda: stage.ends, LEAVE_WITHIN_S


def time_of_the_run() -> Deadline:
    stage = a_stage(max_time="1m")
    a, _ = stage.joined("a", "b")
    return stage, lambda: "last_round" in a.notices, 60.0


def late_push_in_a_quorum() -> Deadline:
    stage = a_stage(workers=1, quorum=1, grace=20.0)
    stage.joined("a", "b")[0].pushes(1)
    return stage, lambda: stage.version().counter == 1, 20.0


def window_of_asynchronous_mode() -> Deadline:
    stage = a_stage(mode="async", grace=20.0)
    stage.joined("a", "b")[0].pushes(1)
    return stage, lambda: stage.version().counter == 1, 20.0


def slot_without_progress() -> Deadline:
    stage = a_stage(mode="async", staging_slots=1, staging_deadline=20.0)
    for push_id, puppet in enumerate(stage.joined("a", "b")):
        puppet.begins(push_id)
    return stage, lambda: puppet.got(Grant).standing is Standing.NEW, 20.0


def worker_that_the_checkpoint_knows() -> Deadline:
    crashed = a_saved_run("a", "b", rounds=1)
    stage = crashed.restarted(recover_wait=20.0)
    stage.worker("a").comes_with(crashed.holdings())
    return stage, lambda: stage.state.round is not None, 20.0


def other_holders_of_a_run() -> Deadline:
    stage = a_stage(recover_wait=20.0)
    a = stage.worker("a").comes_with(holding(12))
    return stage, lambda: a.asked_for == [0], 20.0


def parameters_of_a_seed_worker() -> Deadline:
    stage = a_stage()
    for name in ("a", "b"):
        stage.worker(name).joins()
    b = stage.puppets["b"]
    return stage, lambda: b.asked_for == [0], SEED_PATIENCE_S


DEADLINES = (
    *(time_of_the_last_round, time_to_leave, time_of_the_run, late_push_in_a_quorum),
    *(window_of_asynchronous_mode, slot_without_progress, worker_that_the_checkpoint_knows),
    *(other_holders_of_a_run, parameters_of_a_seed_worker),
)


# Of single workers: their heartbeats and connections go on while the run is held by other means.


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


OF_WORKERS = (
    *(silence, broken_connection, training_loop_that_hangs, workers_of_the_run_before),
    answer_of_a_worker_whose_name_another_one_wants,
)
CASES = [
    *((deadline, is_paused) for deadline in DEADLINES),
    *((deadline, stands_still) for deadline in (time_of_the_last_round, *OF_WORKERS)),
]


@pytest.mark.parametrize(("deadline", "is_held"), CASES)
def test_deadlines_stop_while_run_is_held(
    deadline: Callable[[], Deadline], is_held: Callable[[Stage], None]
) -> None:
    for short_of_it in (2.0, -2.0):
        stage, is_over, seconds = deadline()
        stage.passes(BEFORE_S + 0.2)
        is_held(stage)
        stage.passes(seconds - BEFORE_S - short_of_it)
        assert bool(is_over()) == (short_of_it < 0)


def promises(stage: Stage) -> None:
    """The standby greets the broker, and returns its newest nonce."""
    stage.happens(Received(STANDBY, Promise("sb", 5)))
    nonce = next(m.nonce for m in stage.inbox[STANDBY][::-1] if isinstance(m, Lease))
    stage.happens(Received(STANDBY, Promise("sb", 5, nonce)))


@pytest.mark.parametrize("short_of_it", [2.0, -2.0])
def test_deadline_stops_while_the_lease_has_lapsed(short_of_it: float) -> None:
    # The lease is so long that the hub keeps its workers while it has lapsed.
    stage = a_stage(workers=1, quorum=1, grace=20.0, standby=True, lease=100.0)
    promises(stage)
    stage.passes(100.0 - BEFORE_S)
    stage.joined("a", "b")[0].pushes(1)
    stage.passes(BEFORE_S + 0.2)
    assert not stage.shown()["standby"]["holds_lease"]
    stage.passes(HELD_S)
    promises(stage)
    stage.passes(20.0 - BEFORE_S - short_of_it)
    assert stage.version().counter == (short_of_it < 0)


def test_duration_of_a_round_excludes_a_pause() -> None:
    stage = a_stage()
    workers = stage.joined("a", "b")
    stage.passes(BEFORE_S + 0.2)
    is_paused(stage)
    a_round(workers, 0)
    assert BEFORE_S - 0.5 < stage.reports[-1].seconds < BEFORE_S + 2.5


def test_worker_that_dies_during_a_pause_is_not_awaited() -> None:
    """Workers send heartbeats whether rounds close or not, so silence means what it always does."""
    stage = a_stage(heartbeat_timeout=30.0)
    a, b = stage.joined("a", "b")
    a_round([a, b], 0)
    stage.asks("pause")
    stage.passes_with(60, "a")
    assert stage.expected == {"a"}
    a.pushes(11)
    assert stage.version().counter == 1
    stage.asks("resume")
    assert stage.version().counter == 2


# A broker that did not run for a while: workers whose connections broke have time to come back.


@pytest.mark.parametrize("heartbeat_timeout", [120.0, 2.0, 0.0])
def test_round_waits_for_those_whose_connections_broke_meanwhile(heartbeat_timeout: float) -> None:
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
def test_long_step_of_a_torch_optimizer_is_named_as_a_cause(has_own_optimizer: bool) -> None:
    stage, _ = a_run("a")
    stage.happens(Surroundings(has_own_optimizer=has_own_optimizer))
    stage.stands_still(7.0)
    (text,) = stage.said("suspended for 7 s")
    assert ("a step of its torch optimizer took that long" in text) == has_own_optimizer


@pytest.mark.parametrize("gap", [0.6, 3.0, 1e9])
def test_served_time_follows_the_clock_without_suspensions(gap: float) -> None:
    now = 50.0
    clock = ServedTime(lambda: now)
    for step in (0.0, 0.001, 0.1, LONGEST_S):
        now += step
        assert (clock(), clock.stood_still()) == (now, 0)
    served = now
    now += gap
    assert clock() == pytest.approx(served + COUNTED_S)
    told: Any = clock.stood_still()
    assert told == (pytest.approx(gap - COUNTED_S) if gap > WORTH_SAYING_S else 0)
    assert clock.stood_still() == 0, "it is said once"
    now += 0.1
    assert clock() == pytest.approx(served + 0.1 + COUNTED_S)
