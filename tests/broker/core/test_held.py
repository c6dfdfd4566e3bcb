"""A run that is held by a pause, for want of a lease, or with its broker: its deadlines stand still."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import pytest

from diloco_broker.core.events import Received
from diloco_broker.core.members.start import SEED_PATIENCE_S
from diloco_broker.core.operations.ending import LAST_ROUND_S, LEAVE_WITHIN_S
from diloco_protocol.messages import Lease, Promise
from kit.core_harness import Stage, a_round, a_stage
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
        assert not stage.state.standby.holds

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
    return stage, lambda: stage.state.submissions.find(0, "b", 1) is not None, 20.0


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
    time_of_the_last_round,
    time_to_leave,
    time_of_the_run,
    late_push_in_a_quorum,
    window_of_asynchronous_mode,
    slot_without_progress,
    worker_that_the_checkpoint_knows,
    other_holders_of_a_run,
    parameters_of_a_seed_worker,
)


ALL = [Pause(), LapsedLease(), StoppedBroker()]


@pytest.mark.parametrize("hold", ALL, ids=lambda h: type(h).__name__)
@pytest.mark.parametrize("deadline", DEADLINES, ids=lambda d: d.__name__)
def test_deadlines_stand_still_while_the_run_is_held(
    deadline: Callable[[Hold], Deadline], hold: Hold
) -> None:
    for short_of_it in (2.0, -2.0):
        stage, is_over, seconds = deadline(hold)
        stage.passes(BEFORE_S + 0.2)
        hold.begins(stage)
        hold.lasts(stage)
        assert not is_over(), "it ran out while the run was held"
        hold.ends(stage)
        stage.passes(seconds - BEFORE_S - short_of_it)
        assert bool(is_over()) == (short_of_it < 0)


@HOLDS
def test_a_round_took_the_time_in_which_it_could_close(hold: Hold) -> None:
    stage = hold.stage()
    a, b = stage.joined("a", "b")
    stage.passes(BEFORE_S + 0.2)
    hold.begins(stage)
    stage.passes(HELD_S)
    hold.ends(stage)
    a_round([a, b], 0)
    assert BEFORE_S - 0.5 < stage.reports[-1].seconds < BEFORE_S + 2.5


@HOLDS
def test_a_worker_that_dies_while_the_run_is_held_is_not_waited_for_afterwards(hold: Hold) -> None:
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
