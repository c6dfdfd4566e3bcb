"""A run that is held by a pause, for want of a lease, or with its broker: its deadlines stand still."""

import itertools
from abc import ABC, abstractmethod
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
from kit.core_harness import Puppet, Stage, a_round, a_run, a_stage
from kit.heartbeats import Beating
from kit.restarts import a_saved_run, holding

# How long the run goes on before it is held, and for how long it is.
BEFORE_S = 10.0
HELD_S = 150.0
# Silence is not a deadline of the run, so these timeouts are off.
USUAL: dict[str, Any] = {"chunks": 2, "heartbeat_timeout": 0.0, "stall_timeout": 0.0}


class Hold(ABC):
    """What holds the run."""

    options: dict[str, Any] = {}  # noqa: RUF012  never changed
    started_s = 0.0  # how long the broker has run when the test begins

    def stage(self, **options: Any) -> Stage:
        return self.starts(a_stage(**(USUAL | self.options | options)))

    def starts(self, stage: Stage) -> Stage:
        """The broker has started; from now on the run goes on for `BEFORE_S`."""
        return stage

    @abstractmethod
    def begins(self, stage: Stage) -> None: ...

    def lasts(self, stage: Stage) -> None:
        stage.passes(HELD_S)

    @abstractmethod
    def ends(self, stage: Stage) -> None: ...


class Pause(Hold):
    def begins(self, stage: Stage) -> None:
        stage.asks("pause")

    def ends(self, stage: Stage) -> None:
        stage.asks("resume")


class LapsedLease(Hold):
    """A lease that is long enough for the hub to keep its workers while it has lapsed."""

    lease_s = 100.0
    options = {"standby": True, "lease": lease_s}  # noqa: RUF012  never changed
    started_s = lease_s - BEFORE_S
    route = b"standby"

    def starts(self, stage: Stage) -> Stage:
        stage.happens(Received(self.route, Promise("sb", 5)))
        self.ends(stage)
        stage.passes(self.started_s)
        return stage

    def begins(self, stage: Stage) -> None:
        assert not stage.shown()["standby"]["holds_lease"]

    def ends(self, stage: Stage) -> None:
        nonce = next(m.nonce for m in stage.inbox[self.route][::-1] if isinstance(m, Lease))
        stage.happens(Received(self.route, Promise("sb", 5, nonce)))


class StoppedBroker(Hold):
    """The broker's process is stopped, or its machine sleeps for a night."""

    def begins(self, stage: Stage) -> None:
        stage.stands_still(30_000.0)

    def lasts(self, stage: Stage) -> None:
        """All of it is over when it goes on."""

    def ends(self, stage: Stage) -> None:
        """It goes on by itself."""


HOLDS = pytest.mark.parametrize("hold", [Pause(), LapsedLease()], ids=lambda h: type(h).__name__)
Deadline = tuple[Stage, Callable[[], object], float]


def time_of_the_last_round(hold: Hold) -> Deadline:
    stage = hold.stage(max_rounds=2)
    a, b = stage.joined("a", "b")
    a_round([a, b], 0)
    a.pushes(11)
    return stage, lambda: "over" in b.notices, LAST_ROUND_S


def time_to_leave(hold: Hold) -> Deadline:
    stage = hold.stage(max_rounds=1)
    a_round(stage.joined("a", "b"), 0)
    return stage, lambda: stage.ends, LEAVE_WITHIN_S


def time_of_the_run(hold: Hold) -> Deadline:
    stage = hold.stage(max_time="1m")
    a, _ = stage.joined("a", "b")
    return stage, lambda: "last_round" in a.notices, 60.0


def late_push_in_a_quorum(hold: Hold) -> Deadline:
    stage = hold.stage(workers=1, quorum=1, grace=20.0)
    stage.joined("a", "b")[0].pushes(1)
    return stage, lambda: stage.version().counter == 1, 20.0


def window_of_asynchronous_mode(hold: Hold) -> Deadline:
    stage = hold.stage(mode="async", grace=20.0)
    stage.joined("a", "b")[0].pushes(1)
    return stage, lambda: stage.version().counter == 1, 20.0


def slot_without_progress(hold: Hold) -> Deadline:
    stage = hold.stage(mode="async", staging_slots=1, staging_deadline=20.0)
    for push_id, puppet in enumerate(stage.joined("a", "b")):
        puppet.begins(push_id)
    return stage, lambda: puppet.got(Grant).standing is Standing.NEW, 20.0


def worker_that_the_checkpoint_knows(hold: Hold) -> Deadline:
    crashed = a_saved_run("a", "b", rounds=1)
    wait_s = hold.started_s + 20.0
    stage = hold.starts(crashed.restarted(recover_wait=wait_s, **hold.options))
    stage.worker("a").comes_with(crashed.holdings())
    return stage, lambda: stage.state.round is not None, 20.0


def other_holders_of_a_run(hold: Hold) -> Deadline:
    stage = hold.stage(recover_wait=20.0)
    a = stage.worker("a").comes_with(holding(12))
    return stage, lambda: a.asked_for == [0], 20.0


def parameters_of_a_seed_worker(hold: Hold) -> Deadline:
    stage = hold.stage()
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


def silence(_hold: Hold) -> Deadline:
    stage, _ = a_run("a", heartbeat_timeout=30.0)
    return stage, lambda: "a" not in stage.here, 30.0


def broken_connection(_hold: Hold) -> Deadline:
    stage, (a, _) = a_run("a", "b", disconnect_grace=20.0)
    a.loses_connection()
    return stage, lambda: "a" not in stage.here, 20.0


def training_loop_that_hangs(_hold: Hold) -> Deadline:
    stage, _ = a_run("a", "b", stall_timeout=60.0)
    beating = Beating(stage)
    for name in "ab":
        beating.beats(name)

    def has_stalled() -> bool:
        beating.beats("a")
        beating.beats("b", "standing")
        return bool(stage.expected == {"a"})

    return stage, has_stalled, 60.0


def workers_of_the_run_before(_hold: Hold) -> Deadline:
    crashed = a_saved_run("a", "b", rounds=1)
    stage = crashed.restarted(recover_wait=20.0)
    stage.passes(20.1)
    a = stage.worker("a").comes_with(crashed.holdings())
    a.pushes(11)
    return stage, lambda: stage.version().counter == 2, 20.0


def answer_of_a_worker_whose_name_another_one_wants(_hold: Hold) -> Deadline:
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
    *itertools.product(DEADLINES, [Pause(), LapsedLease(), StoppedBroker()]),
    *((deadline, StoppedBroker()) for deadline in OF_WORKERS),
]


@pytest.mark.parametrize(
    ("deadline", "hold"), CASES, ids=[f"{d.__name__}-{type(h).__name__}" for d, h in CASES]
)
def test_deadlines_stop_while_run_is_held(deadline: Callable[[Hold], Deadline], hold: Hold) -> None:
    for short_of_it in (2.0, -2.0):
        stage, is_over, seconds = deadline(hold)
        stage.passes(BEFORE_S + 0.2)
        hold.begins(stage)
        hold.lasts(stage)
        hold.ends(stage)
        stage.passes(seconds - BEFORE_S - short_of_it)
        assert bool(is_over()) == (short_of_it < 0)


@HOLDS
def test_duration_of_a_round_excludes_holds(hold: Hold) -> None:
    stage = hold.stage()
    a, b = stage.joined("a", "b")
    stage.passes(BEFORE_S + 0.2)
    hold.begins(stage)
    stage.passes(HELD_S)
    hold.ends(stage)
    a_round([a, b], 0)
    assert BEFORE_S - 0.5 < stage.reports[-1].seconds < BEFORE_S + 2.5


@HOLDS
def test_worker_that_dies_during_a_hold_is_not_awaited(hold: Hold) -> None:
    """Workers send heartbeats whether rounds close or not, so silence means what it always does."""
    stage = hold.stage(heartbeat_timeout=30.0)
    a, b = stage.joined("a", "b")
    a_round([a, b], 0)
    stage.passes(BEFORE_S + 0.2)
    hold.begins(stage)
    stage.passes_with(60, "a")
    assert stage.expected == {"a"}
    a.pushes(11)
    assert stage.version().counter == 1
    hold.ends(stage)
    stage.passes(0.2)
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


@pytest.mark.parametrize("step", [0.0, 0.001, 0.1, LONGEST_S])
def test_served_time_follows_the_machine_clock(step: float) -> None:
    now = 50.0
    clock = ServedTime(lambda: now)
    for _ in range(100):
        now += step
        assert clock() == now
    assert clock.stood_still() == 0


@pytest.mark.parametrize("gap", [0.6, 3.0, 1e9])
def test_served_time_leaves_out_suspensions(gap: float) -> None:
    now = 50.0
    clock = ServedTime(lambda: now)
    now += gap
    assert clock() == pytest.approx(50.0 + COUNTED_S)
    told: Any = clock.stood_still()
    assert told == (pytest.approx(gap - COUNTED_S) if gap > WORTH_SAYING_S else 0)
    assert clock.stood_still() == 0, "it is said once"
    now += 0.1
    assert clock() == pytest.approx(50.1 + COUNTED_S)
