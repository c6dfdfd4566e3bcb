"""A worker goes on from its checkpoint, message by message."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from diloco_protocol import Bitmap, Ledger
from diloco_protocol.messages import Chunk, Error, Notice, Pull, Purpose, Push, Released
from diloco_worker.core.effects import Send
from diloco_worker.core.events import Offer, VerifyPushes
from kit.scripted_broker import RUN, ScriptedBroker, run_config, version
from kit.scripted_training import H, ScriptedTraining
from kit.session_harness import Desk, gradient
from kit.session_harness import version as version_of
from kit.uniform_model import first

pytest_plugins = ("kit.worker_fixtures",)

STRANGER = 0xABC  # a push that no checkpoint knows


def resumed(training: ScriptedTraining, steps: int = 2, **keywords: Any) -> None:
    """A worker has made these steps; its next life has joined a broker that is where it was."""
    training.begins(**keywords)
    training.steps(steps)
    training.resumes(training.saves(), version(0))
    training.says_current(0)
    training.done()


def test_worker_joins_with_what_it_holds_and_trains_on_in_the_middle_of_the_cycle(
    training: ScriptedTraining,
) -> None:
    training.begins()
    training.steps(2)
    join = training.resumes(training.saves(), version(0), worker_id=None)
    assert (join.run, join.session, join.worker_id) == (RUN, None, "me")
    assert training.worker.worker_id == "me", "the id that it had"
    assert join.versions[0] == version(0)
    pull = training.says_current(0)
    assert (pull.held_version, pull.after) == (version(0), -1)
    assert pull.held == Bitmap.full(3).to_bytes(), "nothing needs to be sent"
    training.done()
    assert training.values == 98
    training.trains(2)
    training.says_current(0)
    push, delta = training.takes()
    assert (push.steps, push.base, delta) == (H, version(0), H)
    training.serves(50, 1, push)
    training.done()
    assert (training.values, training.worker.local_step, training.worker.sync_count) == (50, H, 1)
    push = training.round(H, 2)  # no longer in doubt: offered without asking
    assert push.base == version(1)


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(3, 3)
        self.fixed = nn.Linear(2, 2).requires_grad_(False)


def test_frozen_parameters_are_those_that_the_script_has_loaded(training: ScriptedTraining) -> None:
    training.begins(PartlyFrozen())
    training.steps(1)
    join = training.resumes(training.saves(), version(0), model=PartlyFrozen())
    assert join.versions == (version(0), version(0))
    training.says_current(0)
    training.done()
    training.broker.hears_nothing_of(Pull, 0.1)
    training.broker.says(Notice("donate", fragment=1))
    donation, given = training.broker.takes_push()
    assert donation.base == version(0)
    assert not any(bool(vector.any()) for vector in given.vectors.values())


@pytest.mark.parametrize(
    ("config", "keywords", "after_landing"),
    [
        ({"fragment_sync_delay": 2}, {}, 1000),  # the steps in flight are overwritten
        ({"fragment_sync_delay": 2, "fragment_merge": "rebase"}, {}, 1000 - 2),
        ({"fragment_sync_delay": 2, "fragment_update_alpha": 0.5}, {}, 0.5 * 94 + 500),
        ({}, {"timeout": 0.2}, 1000 - 2),  # it had been let go at the boundary
    ],
)
def test_delta_in_flight_is_offered_again_as_it_was_and_merged_as_it_would_have_been(
    training: ScriptedTraining,
    broker: ScriptedBroker,
    config: dict[str, Any],
    keywords: dict[str, Any],
    after_landing: float,
) -> None:
    worker = training.begins(config=config, **keywords)
    worker.report(tokens=7, samples=3, loss=2.5)
    training.steps(H + 1)
    earlier = broker.hears(Push)
    training.resumes(training.saves(), version(0))
    training.says_current(0)
    training.done()
    training.says_current(0)
    push, delta = training.takes()
    assert replace(push, session=b"") == replace(earlier, session=b"")
    assert delta == H
    assert training.values == 100 - H - 1
    training.brings(1000, 1, push)
    training.steps(1)
    assert (training.values, training.worker.sync_count) == (after_landing, 1)


def test_steps_that_nobody_has_counted_keep_their_base_though_the_broker_is_newer(
    training: ScriptedTraining, broker: ScriptedBroker
) -> None:
    training.begins()
    training.steps(2)
    training.resumes(training.saves(), version(3))
    broker.hears_pull()
    training.serves(500, 3)
    training.done()
    assert training.values == 98
    training.trains(2)
    training.says_current(3)
    push, delta = training.takes()
    assert (push.base, delta) == (version(0), H)
    training.serves(400, 4, push)
    training.done()
    assert (training.values, training.metrics.staleness) == (400, 3)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("flight_counted", [False, True])
def test_steps_that_a_later_life_has_sent_give_way_to_the_global_parameters(
    training: ScriptedTraining,
    broker: ScriptedBroker,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    in_flight: bool,
    flight_counted: bool,
) -> None:
    training.begins(config={"fragment_sync_delay": 3})
    training.steps(H + 1 if in_flight else 2)
    ids = [broker.hears(Push).push_id] if in_flight else []
    audit = tmp_path / "audit"
    training.resumes(training.saves(), version(3), audit=audit)
    broker.hears_pull()
    counted = [*(ids if flight_counted else []), STRANGER]
    has_version_of(training, 500, 3, *counted)
    training.done()
    assert training.values == 500
    lost = 2 if not in_flight else 1 if flight_counted else H + 1
    assert f"{lost} steps of fragment 0 are left out" in caplog.text
    assert training.worker.sync_count == (in_flight and flight_counted)
    written = audit.read_text()
    assert ('"counted"' in written) == (in_flight and flight_counted)
    assert ('"superseded"' in written) == (in_flight and not flight_counted)
    left = H - 1 if in_flight else 2
    training.steps(left)
    push, delta = training.takes()  # nothing is in doubt: offered without asking
    assert (push.base, push.steps, delta) == (version(3), left, left)


def has_version_of(training: ScriptedTraining, value: float, counter: int, *counted: int) -> None:
    """A version that contains these pushes."""
    state = training.filled(value)
    training.broker.serves(state, version(counter), *counted)


def test_stranger_that_is_counted_later_ends_the_push_before_a_chunk_is_sent(
    training: ScriptedTraining, broker: ScriptedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    resumed(training)
    training.trains(2)
    training.says_current(0)
    push = broker.hears(Push)
    broker.puts_off(push, 1)
    has_version_of(training, 700, 1, STRANGER)
    broker.grants(push, round_=1)
    training.done()
    assert training.values == 700
    assert "4 steps of fragment 0 are left out" in caplog.text
    broker.hears_nothing_of(Chunk, 0.1)
    assert training.round(H, 2).base == version(1)


def test_broker_that_is_behind_is_asked_for_nothing_and_given_what_is_held(
    training: ScriptedTraining, broker: ScriptedBroker
) -> None:
    training.begins()
    push = training.round(H, 1, 500)
    training.steps(1)
    training.resumes(training.saves(), version(0))
    training.done()
    assert training.values == 499
    broker.says(Notice("donate", fragment=0))
    donation, given = broker.takes_push()
    assert (donation.purpose, donation.base, first(given)) == (Purpose.DONATION, version(1), 500)
    assert donation.ledger is not None
    assert donation.ledger.names_whole("me", push.push_id)
    training.trains(H - 1)
    broker.hears_pull()
    training.serves(100, 0)
    push, delta = training.takes()
    assert (push.base, delta) == (version(1), H), "measured from what is held"
    training.serves(50, 1, push)
    training.done()


@pytest.mark.parametrize("is_another_run", [False, True])
def test_run_in_another_shape_or_another_run_is_joined_as_by_a_new_worker(
    training: ScriptedTraining, caplog: pytest.LogCaptureFixture, is_another_run: bool
) -> None:
    broker = training.broker
    training.begins()
    push = training.round(H, 1)
    training.steps(2)
    saved = training.saves()
    if is_another_run:
        training.resumes(saved, answer=Error("run_differs", "This is another run.", about="join"))
        assert broker.welcomes(version(2)).run is None
        why = "this broker serves another run"
    else:
        broker.config = run_config(fragment_sync_delay=1)
        training.resumes(saved, version(2))
        why = "it has fragment_sync_delay 0, the run has 1 now"
    assert broker.hears_pull().held_version is None
    training.serves(500, 2)
    training.done()
    assert caplog.text.count(f"cannot be used here: {why}") == 1
    assert (training.values, training.worker.local_step, training.worker.sync_count) == (500, 6, 1)
    following = training.round(2, 3)
    assert following.push_id != push.push_id, "the place in the cycle is kept"


@pytest.mark.parametrize("has_another_id", [True, False])
def test_worker_with_another_id_or_without_parameters_takes_over_the_counters_and_nothing_else(
    training: ScriptedTraining,
    broker: ScriptedBroker,
    caplog: pytest.LogCaptureFixture,
    has_another_id: bool,
) -> None:
    training.begins()
    training.steps(1)
    state, tensors = training.saves()
    if not has_another_id:
        state["resume"] = None
    name = "you" if has_another_id else "me"
    join = training.resumes((state, tensors), version(0), worker_id=name)
    assert (join.worker_id, join.run) == (name, None)
    assert ("state is that of worker 'me', this one is 'you'" in caplog.text) == has_another_id
    broker.hears_pull()
    training.serves(100, 0)
    training.done()
    assert (training.values, training.worker.local_step) == (100, 1)
    training.trains(H - 1)
    last = training.filled(0)
    push, _ = training.takes()
    assert push.steps == H - 1, "the place in the cycle is kept"
    broker.serves(last, version(1), push.push_id, worker=name)
    training.done()


def test_push_in_doubt_is_offered_behind_the_pull_for_the_next_version(ready: Desk) -> None:
    """Then the broker tells of a version before it grants what follows from it."""
    ready.happens(VerifyPushes(0, frozenset()), Offer(gradient(77)))
    assert not ready.sent(Push)
    ready.hears(Released(0, version_of(0), Ledger()))
    sent = [e.message for e in ready.all(Send) if isinstance(e.message, Pull | Push)]
    assert [type(message) for message in sent] == [Pull, Push]
    assert isinstance(sent[0], Pull) and sent[0].after == 0
