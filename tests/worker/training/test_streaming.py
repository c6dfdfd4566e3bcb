"""Fragments in flight while training goes on: what is merged when, against sequences worked out by hand.

Each optimizer step lowers every value by 1, from 100. With H = 6 and P = 3 fragment 0 has its slot after
step 2, fragment 1 after step 4, fragment 2 after step 6.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from diloco_protocol.messages import (
    Ack,
    Chunk,
    Commit,
    Error,
    Grant,
    Leave,
    Message,
    Notice,
    Pull,
    Push,
    Released,
    Standing,
)
from diloco_worker import DiLoCoWorker
from kit.scripted_broker import Beside, Descent, ScriptedBroker, run_config, version
from kit.uniform_model import Make, at, filled, first, until

pytest_plugins = ("kit.worker_fixtures",)


def layers(count: int = 3) -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


def streams(broker: ScriptedBroker, **changes: Any) -> None:
    """The broker's run: H = 6 and P = 3 unless told otherwise."""
    broker.config = run_config(**{"sync_every": 6, "num_fragments": 3, **changes})


def has_news(worker: DiLoCoWorker) -> None:
    until(lambda: bool(worker._link and worker._link.has_news))


def hears_of_rounds(worker: DiLoCoWorker) -> None:
    until(lambda: bool(worker._link and worker._link.turns))


def tells_rounds(broker: ScriptedBroker, round_: int) -> None:
    """The versions that it serves from now on were made in this round."""
    says = broker.says

    def with_round(message: Message, payload: Any = None) -> None:
        if isinstance(message, Released):
            message = replace(message, round=round_, averaged=1)
        says(message, payload)

    broker.says = with_round  # type: ignore[method-assign]


# Without delay.


def test_fragments_are_pushed_in_turn_at_their_slots(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    streams(broker)
    worker, descent = begin(layers())
    for round_, (to_slot, delta) in enumerate([(2, 2), (2, 4), (2, 6), (2, 6), (2, 6)]):
        fragment = round_ % 3
        steps = beside(descent.steps, to_slot)
        push, frozen = broker.takes_push(round_)
        assert (push.fragment, push.steps, first(frozen)) == (fragment, delta, delta)
        assert push.base == version(round_ // 3)
        assert beside.is_busy, "without delay training waits"
        new = filled(descent, 1000 + round_, broker, fragment)
        broker.serves(new, version(round_ // 3 + 1), push.push_id)
        steps()
        assert at(descent, broker, fragment) == 1000 + round_
    assert at(descent, broker, 2) == 1002 - 4, "the others' merges leave a fragment alone"
    metrics = worker.sync_metrics
    assert (metrics.rounds, metrics.late_merges, metrics.unsynced_steps) == (5, 0, 0)
    assert worker.sync_every == 6


def test_first_push_is_for_the_first_round_expected(broker: ScriptedBroker, begin: Make) -> None:
    streams(broker, fragment_sync_delay=1)
    _, descent = begin(layers(), first_round=5)
    descent.steps(2)
    assert broker.hears(Push).fragment == 2


def test_restored_worker_reaches_its_next_slot_after_what_is_left(
    broker: ScriptedBroker, begin: Make
) -> None:
    streams(broker, fragment_sync_delay=1)
    state = DiLoCoWorker(*_alone()).state_dict() | {"local_step": 15, "cycle_start": 14}
    worker, descent = begin(layers(), state=state)
    descent.steps(1)
    push = broker.hears(Push)
    assert (push.fragment, push.steps) == (0, 1)
    assert (worker.local_step, worker.state_dict()["cycle_start"]) == (16, 14)


def _alone() -> tuple[nn.Module, torch.optim.Optimizer]:
    descent = Descent()
    return descent.model, descent.optimizer


# Merging.

MERGES = [
    # changes of the configuration, fragment 0 after the merge of 1000 behind step 4
    ({}, 1000.0),
    ({"fragment_update_alpha": 0.5}, 0.5 * 96 + 0.5 * 1000),
    ({"fragment_update_alpha": 0.25}, 0.25 * 96 + 0.75 * 1000),
    ({"fragment_update_alpha": 1.0}, 96.0),
    ({"fragment_merge": "rebase"}, 1000.0 - 2),
    ({"fragment_merge": "rebase", "fragment_update_alpha": 0.5}, 1000.0 - 2),
]


@pytest.mark.parametrize(("merge", "merged"), MERGES)
def test_early_reply_is_merged_at_the_apply_point_and_never_earlier(
    broker: ScriptedBroker, begin: Make, merge: dict[str, Any], merged: float
) -> None:
    streams(broker, fragment_sync_delay=2, **merge)
    worker, descent = begin(layers())
    descent.steps(2)
    push, delta = broker.takes_push(0)
    assert (push.fragment, first(delta)) == (0, 2)
    broker.serves(filled(descent, 1000, broker), version(1), push.push_id)
    has_news(worker)
    descent.steps(1)
    assert at(descent, broker) == 97, "the reply is here, but its time has not come"
    descent.steps(1)
    assert at(descent, broker) == merged
    assert (worker.sync_metrics.rounds, worker.sync_metrics.late_merges) == (1, 0)
    second, _ = broker.takes_push(1)
    broker.serves(filled(descent, 1, broker, 1), version(1), second.push_id)
    has_news(worker)
    descent.steps(2)
    third, _ = broker.takes_push(2)
    broker.serves(filled(descent, 1, broker, 2), version(1), third.push_id)
    has_news(worker)
    descent.steps(2)
    again, delta = broker.takes_push(3)
    assert (again.fragment, again.base, again.steps) == (0, version(1), 6)
    assert first(delta) == 1000 - (merged - 4), "measured from what was received"


def test_reply_that_is_not_there_at_the_apply_point_is_waited_for(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    streams(broker, fragment_sync_delay=1)
    worker, descent = begin(layers())
    descent.steps(2)
    steps = beside(descent.steps, 1)
    push, _ = broker.takes_push(0)
    assert beside.is_busy
    broker.serves(filled(descent, 1000, broker), version(1), push.push_id)
    steps()
    assert at(descent, broker) == 1000
    assert worker.sync_metrics.late_merges == 0
    assert worker.sync_metrics.seconds_waited > 0


@pytest.mark.parametrize(
    ("merge", "merged"),
    [
        ({}, 1000.0),
        ({"fragment_update_alpha": 0.5}, 0.5 * 95 + 500),
        ({"fragment_merge": "rebase"}, 1000.0 - 3),
        ({"fragment_merge": "rebase", "fragment_sync_delay": 0}, 1000.0 - 3),
    ],
)
def test_late_reply_is_merged_at_the_first_step_after_it_has_come(
    broker: ScriptedBroker, begin: Make, merge: dict[str, Any], merged: float
) -> None:
    streams(broker, **{"fragment_sync_delay": 1, "fragment_max_delay": 4, **merge})
    worker, descent = begin(layers())
    descent.steps(4)  # past the apply point, and past the slot of fragment 1
    push, _ = broker.takes_push(0)
    second = broker.hears(Push)
    assert (push.fragment, second.fragment) == (0, 1), "two fragments are in flight"
    broker.serves(filled(descent, 1000, broker), version(1), push.push_id)
    has_news(worker)
    descent.steps(1)
    assert at(descent, broker) == merged
    assert (worker.sync_metrics.rounds, worker.sync_metrics.late_merges) == (1, 1)


def test_training_waits_at_the_latest_when_the_delay_is_used_up(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    streams(broker, fragment_sync_delay=1, fragment_max_delay=3)
    _, descent = begin(layers())
    descent.steps(4)
    push, _ = broker.takes_push(0)
    steps = beside(descent.steps, 1)
    broker.hears(Push)
    assert beside.is_busy
    broker.serves(filled(descent, 1000, broker), version(1), push.push_id)
    steps()
    assert at(descent, broker) == 1000


def test_slot_of_a_fragment_that_is_still_in_flight_waits_for_it(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    streams(broker, sync_every=2, num_fragments=1, fragment_max_delay=100)
    worker, descent = begin()
    descent.steps(3)
    push, _ = broker.takes_push(0)
    steps = beside(descent.steps, 1)
    worker_waits(worker)
    broker.hears_nothing_of(Push, 0.05)
    broker.serves(filled(descent, 1000), version(1), push.push_id)
    steps()
    again, delta = broker.takes_push(1)
    assert (again.base, again.steps, first(delta)) == (version(1), 2, 0)


def worker_waits(worker: DiLoCoWorker) -> None:
    until(lambda: bool(worker._link and worker._link.progress.waiting))


# Giving up, coming back.


@pytest.mark.parametrize(
    ("merge", "merged"),
    [
        # frozen at 96, given up at 95, counted when the model is at 93
        ({}, 1000.0 + (93 - 95)),
        ({"fragment_update_alpha": 0.5}, 0.5 * 95 + 0.5 * 1000 + (93 - 95)),
        ({"fragment_update_alpha": 1.0}, 93.0),
        ({"fragment_merge": "rebase"}, 1000.0 + (93 - 96)),
    ],
)
def test_steps_after_giving_up_are_kept_whole(
    broker: ScriptedBroker, begin: Make, merge: dict[str, Any], merged: float
) -> None:
    broker.config = run_config(fragment_sync_delay=1, **merge)
    worker, descent = begin(timeout=0.3)
    descent.steps(6)  # nobody answers
    assert at(descent) == 94
    assert worker.sync_metrics.unsynced_steps == 6
    push, delta = broker.takes_push(0)
    assert first(delta) == 4
    broker.serves(filled(descent, 1000), version(1), push.push_id)
    has_news(worker)
    descent.steps(1)
    assert at(descent) == merged
    metrics = worker.sync_metrics
    assert (metrics.rounds, metrics.late_merges, metrics.unsynced_steps) == (1, 1, 0)


def test_flights_and_their_order_survive_a_broken_connection(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    streams(broker, fragment_sync_delay=1, fragment_max_delay=3)
    _, descent = begin(layers())
    descent.steps(4)
    one, two = broker.hears(Push), broker.hears(Push)
    broker.restart()
    join = broker.welcomes(*[version(0)] * 3, first_round=0)
    assert join.versions[:3] == (version(0),) * 3
    assert [broker.hears(Push), broker.hears(Push)] == [
        _again(one, broker),
        _again(two, broker),
    ]
    steps = beside(descent.steps, 1)
    broker.serves(filled(descent, 1000, broker), version(1), one.push_id)
    steps()
    assert at(descent, broker) == 1000


def _again(push: Push, broker: ScriptedBroker) -> Push:
    return Push(**{**vars(push), "session": broker.sessions.to_bytes(16, "big")})


@pytest.mark.parametrize(("first_round", "next_fragment"), [(3, 1), (4, 1), (5, 2), (2, 2)])
def test_welcome_moves_the_cursor_past_what_is_in_flight(
    broker: ScriptedBroker, begin: Make, first_round: int, next_fragment: int
) -> None:
    streams(broker, fragment_max_delay=100)
    worker, descent = begin(layers())
    descent.steps(2)
    assert broker.hears(Push).fragment == 0
    broker.restart()
    broker.welcomes(*[version(0)] * 3, first_round=first_round)
    hears_of_rounds(worker)
    assert broker.hears(Push).fragment == 0
    descent.steps(2)
    assert broker.hears(Push).fragment == next_fragment


# Rounds that close without this worker.


def test_flight_that_is_put_off_is_not_waited_for_until_its_round_has_come(
    broker: ScriptedBroker, beside: Beside, begin: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "diloco.worker")
    streams(broker)
    worker, descent = begin(layers())
    steps = beside(descent.steps, 2)
    push = broker.hears(Push)
    broker.puts_off(push, 3)  # rounds 1 and 2 still want pushes of this worker
    steps()
    for fragment in (1, 2):
        steps = beside(descent.steps, 2)
        other, _ = broker.takes_push(fragment)
        assert other.fragment == fragment
        broker.serves(filled(descent, 5, broker, fragment), version(1), other.push_id)
        steps()
    steps = beside(descent.steps, 2)
    worker_waits(worker)
    broker.hears_nothing_of(Push, 0.05)
    broker.says(Grant(push.push_id, 0, Standing.NEW, credit=8, round=3))
    broker.takes_chunks(push, push.chunks)
    broker.serves(filled(descent, 1000, broker), version(2), push.push_id)
    steps()
    assert at(descent, broker) == 1000 - 6, "the steps since the freeze are kept"
    steps = beside(descent.steps, 2)
    following = broker.hears(Push)
    assert (following.fragment, following.steps) == (1, 6)
    assert caplog.text.count("carried into round 3") == 1
    broker.says(Notice("shutdown"))
    steps()


def test_flight_in_its_late_round_has_the_delay_of_one_that_was_frozen_there(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    streams(broker, fragment_sync_delay=1)
    worker, descent = begin(layers())
    descent.steps(2)
    push = broker.hears(Push)
    broker.puts_off(push, 3)
    hears_of_rounds(worker)
    descent.steps(2)
    for fragment in (1, 2):
        other, _ = broker.takes_push(fragment)
        broker.serves(filled(descent, 5, broker, fragment), version(1), other.push_id)
        has_news(worker)
        descent.steps(2)
    assert at(descent, broker) == 92, "its turn has come, and it may come in until the next step"
    steps = beside(descent.steps, 1)
    worker_waits(worker)
    broker.serves(filled(descent, 1000, broker), version(2), push.push_id)
    steps()
    assert at(descent, broker) == 1000 - 6, "frozen at 98, let go at 97, counted at 91"


def test_notice_that_a_push_is_carried_ends_the_waiting(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    streams(broker)
    worker, descent = begin(layers())
    steps = beside(descent.steps, 2)
    broker.hears(Push)
    worker_waits(worker)
    broker.says(Notice("carried", "Too late.", fragment=0, round=3))
    steps()
    assert at(descent, broker) == 98
    assert worker.sync_metrics.last_error is None, "a matter of course"


def test_leaving_does_not_wait_for_a_round_that_waits_for_this_worker(
    broker: ScriptedBroker, begin: Make
) -> None:
    streams(broker, fragment_sync_delay=2)
    worker, descent = begin(layers())
    descent.steps(2)
    broker.puts_off(broker.hears(Push), 3)
    hears_of_rounds(worker)
    worker.close()
    broker.hears(Leave, patience=5)


@pytest.mark.parametrize("told", ["granted", "carried"])
def test_leaving_waits_until_a_carried_push_is_in(
    broker: ScriptedBroker, beside: Beside, begin: Make, told: str
) -> None:
    streams(broker, fragment_sync_delay=2)
    worker, descent = begin(layers())
    descent.steps(2)
    push = broker.hears(Push)
    if told == "granted":
        broker.grants(push, credit=1, round_=3)
    else:
        broker.grants(push, credit=1, round_=0)
        broker.says(Notice("carried", "Too late.", fragment=0, round=3))
    hears_of_rounds(worker)
    _, chunk, _ = broker.hears_from(Chunk)
    closed = beside(worker.close)
    broker.hears_nothing_of(Leave, 0.1)
    assert beside.is_busy
    broker.says(Ack(push.push_id, 0, (chunk.index,)))
    broker.takes_chunks(push, push.chunks - 1)
    broker.hears(Commit)
    closed()
    broker.hears(Leave)


def test_leaving_gives_up_a_carried_push_that_does_not_get_in_within_the_time(
    broker: ScriptedBroker, begin: Make
) -> None:
    streams(broker, fragment_sync_delay=2)
    worker, descent = begin(layers(), timeout=0.3)
    descent.steps(2)
    broker.grants(broker.hears(Push), credit=1, round_=3)
    hears_of_rounds(worker)
    worker.close()
    broker.hears(Leave)
    assert "Leaving with 2 steps in flight" in str(worker.sync_metrics.last_error)


def test_push_that_came_too_late_leaves_its_round_to_those_who_were_in_time(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    streams(broker, fragment_sync_delay=2)
    worker, descent = begin(layers())
    descent.steps(2)
    push = broker.hears(Push)
    broker.grants(push, credit=1, round_=0)
    broker.says(Error("late", "The round is over.", push_id=push.push_id, about="push"))
    has_news(worker)
    descent.steps(2)
    assert broker.hears(Push).fragment == 1


def test_version_made_meanwhile_moves_the_turn_past_its_round(
    broker: ScriptedBroker, begin: Make
) -> None:
    streams(broker, fragment_sync_delay=2)
    worker, descent = begin(layers())
    descent.steps(2)
    push = broker.hears(Push)
    broker.says(Error("late", "The round is over.", push_id=push.push_id, about="push"))
    has_news(worker)
    descent.steps(1)
    while broker.hears_pull().after != -1:  # the newest, whatever it contains
        pass
    tells_rounds(broker, 3)
    broker.serves(filled(descent, 500, broker), version(2))
    has_news(worker)
    descent.steps(1)
    assert broker.hears(Push).fragment == 1, "round 4 comes next"


LATE = [("late", 0), ("late", 1), ("stale", 0), ("stale", 1)]


@pytest.mark.parametrize(("code", "tau"), LATE)
@pytest.mark.parametrize(
    "merge", [{}, {"fragment_update_alpha": 0.5}, {"fragment_merge": "rebase"}]
)
def test_push_that_came_too_late_is_dropped_and_the_model_moves_to_the_newest(
    broker: ScriptedBroker,
    beside: Beside,
    begin: Make,
    caplog: pytest.LogCaptureFixture,
    code: str,
    tau: int,
    merge: dict[str, Any],
) -> None:
    broker.config = run_config(fragment_sync_delay=tau, **merge)
    worker, descent = begin()
    steps = beside(descent.steps, 4 + tau)
    push = broker.hears(Push)
    broker.says(Error(code, "The round is over.", push_id=push.push_id, about="push"))
    steps()
    assert at(descent) == 100 - tau, "the frozen steps are gone, the others stay"
    while broker.hears(Pull).after != -1:  # the newest, whatever it contains
        pass
    broker.serves(filled(descent, 500), version(3))
    has_news(worker)
    descent.steps(1)
    assert at(descent) == 500 - tau - 1
    metrics = worker.sync_metrics
    assert (metrics.rejected, metrics.rounds) == (1, 0)
    assert "The round is over." in str(metrics.last_error)
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    steps = beside(descent.steps, 4 - tau - 1)
    again, delta = broker.takes_push()
    assert (again.base, first(delta)) == (version(3), 4)
    broker.serves(filled(descent, 7), version(4), again.push_id)
    steps()
