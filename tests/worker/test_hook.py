"""A healthy worker against a scripted broker, over real sockets."""

import copy
import logging
import threading
import time
from typing import Any

import pytest
import torch
import zmq

from diloco_protocol import UsageError
from diloco_protocol.messages import Error, Heartbeat, Join, Notice, Progress, Purpose, Push
from diloco_worker import DiLoCoWorker
from diloco_worker.session.session import Session
from kit.process_kit import wait_for
from kit.proxy import Cut, MessageProxy
from kit.scripted_broker import Descent, ScriptedBroker, first, run_config, version
from kit.scripted_training import H, ScriptedTraining

pytest_plugins = ("kit.worker_fixtures",)


def test_boundary_pushes_global_minus_local_and_takes_the_new_parameters(
    training: ScriptedTraining, broker: ScriptedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="diloco.worker")
    worker = training.begins()
    assert (training.values, worker.config) == (100, run_config())
    for number in range(1, 4):
        training.trains(H)
        push, delta = training.takes()
        assert delta == H, "the delta is measured from the newest version"
        assert (push.steps, push.base, push.purpose) == (H, version(number - 1), Purpose.GRADIENT)
        assert push.norm == pytest.approx(12**0.5 * H)
        assert training.stands, "training waits for its round"
        training.serves(100 * (number + 1), number, push)
        training.done()
        assert training.values == 100 * (number + 1)
    metrics = training.metrics
    health = {"pushes": 3, "rejected": 0, "retries": 0, "unsynced_steps": 0, "last_error": None}
    assert dict(metrics) | health == dict(metrics)
    assert metrics.bytes_up > 3 * 48 < metrics.bytes_down
    assert metrics.seconds_waited > 0
    assert f"has 4 steps of this worker, norm {push.norm:.4g}, staleness 0; waited" in caplog.text
    wait_for(lambda: not training.link.uploaded)  # the state of a push is dropped with it


def test_seeding_push_is_not_overwritten(
    training: ScriptedTraining, broker: ScriptedBroker
) -> None:
    training.begins()
    training.steps(1)
    broker.says(Notice("seed", fragment=0))
    seeding = broker.hears(Push)
    for counter, steps in ((1, H - 1), (2, H), (3, H)):
        training.round(steps, counter, counter)
    broker.grants(seeding)
    values = broker.decoded(seeding, broker.takes_chunks(seeding, seeding.chunks))
    assert (seeding.base, first(values)) == (version(0), 100)


def test_heartbeats_show_the_state_of_training(training: ScriptedTraining) -> None:
    worker = training.begins()
    for _ in range(3):
        training.steps(1)
        worker.report(loss=torch.tensor(2.5, requires_grad=True), tokens=10)
    worker.report(tokens=5)
    training.trains(1)
    beat = training.broker.hears(Heartbeat)
    assert (beat.step, beat.merge_delay) == (H, None), "each boundary sends one first"
    push, _ = training.takes()
    assert (push.tokens, push.loss) == (35, 2.5)
    training.broker.says(Notice("ping"))
    beat = training.broker.hears(Heartbeat)
    assert (beat.step, beat.inner_step, beat.state) == (4, 0, "waiting")
    assert (beat.loss, beat.tokens) == (2.5, 35)
    assert beat.steps_per_s is not None
    training.serves(1, 1, push)
    training.done()
    beat = training.broker.hears(Heartbeat)
    assert (beat.step, beat.inner_step, beat.state) == (4, 0, "training"), "and one after it"
    assert beat.merge_delay == 0


@pytest.mark.parametrize(("steps", "words"), [(0, "step"), (2, "none of its 2")])
def test_leaving_without_a_step_or_without_a_round_is_logged(
    training: ScriptedTraining, caplog: pytest.LogCaptureFixture, steps: int, words: str
) -> None:
    worker = training.begins()
    training.steps(steps)
    worker.close()
    (said,) = (line for line in caplog.messages if "left without" in line)
    assert words in said


def test_close_never_hangs_without_a_broker(training: ScriptedTraining) -> None:
    worker = training.begins()
    training.broker.close()
    began = time.monotonic()
    worker.close()
    assert time.monotonic() - began < 5
    assert not [t for t in threading.enumerate() if t.name == "diloco-link" and t.is_alive()]


def test_without_a_server_everything_is_a_no_op() -> None:
    descent = Descent()
    with DiLoCoWorker(descent.model, descent.optimizer) as worker:
        before = copy.deepcopy(descent.model.state_dict())
        worker.report(loss=1.0, tokens=3)
        assert worker.force_sync() is worker.load_global() is worker.should_stop is False
        assert (worker.round, worker.global_loss, worker.progress) == (0, None, Progress())
        state = worker.state_dict()
        descent.steps(2)
    for name, value in descent.model.state_dict().items():
        assert torch.allclose(value, before[name] - 2)
    assert dict(worker.sync_metrics)["pushes"] == 0
    DiLoCoWorker(descent.model, descent.optimizer).load_state_dict(state)


def test_old_name_of_pushes_works_in_checkpoints_and_scripts() -> None:
    descent = Descent()
    state = DiLoCoWorker(descent.model, descent.optimizer).state_dict()
    state["metrics"] = {"rounds": 3, "bytes_up": 7}
    worker = DiLoCoWorker(descent.model, descent.optimizer)
    worker.load_state_dict(state)
    metrics = worker.sync_metrics
    assert (metrics.pushes, metrics.bytes_up, worker.sync_count) == (3, 7, 3)
    with pytest.warns(DeprecationWarning, match="pushes"):
        assert metrics.rounds == metrics["rounds"] == 3
    assert "rounds" not in dict(metrics)


def test_state_is_loaded_before_the_start_and_saved_again_without_one(
    training: ScriptedTraining,
) -> None:
    worker = training.begins()
    training.round(H, 1)
    state = worker.state_dict()
    with pytest.raises(UsageError, match="before"):
        worker.load_state_dict(state)
    other = DiLoCoWorker(training.descent.model, training.descent.optimizer)
    other.load_state_dict(copy.deepcopy(state))
    assert other.state_dict() | {"resume": 0} == state | {"resume": 0}


@pytest.mark.parametrize(
    ("merge", "merged"),
    [
        ({}, 1000.0 - 1),
        ({"fragment_update_alpha": 0.5}, 0.5 * 500 + 0.5 * 1000 - 1),
        ({"fragment_merge": "rebase"}, 1000.0 - 1),
    ],
)
def test_push_in_flight_during_load_global_is_merged_onto_the_loaded_values(
    training: ScriptedTraining, broker: ScriptedBroker, merge: dict[str, Any], merged: float
) -> None:
    worker = training.begins(config={"fragment_sync_delay": 3, **merge})
    training.steps(H)
    push = broker.hears(Push)
    training.does(worker.load_global)
    training.is_asked_for_newest()
    training.serves(500, 1)
    assert training.done() is True
    assert training.values == 500
    training.brings(1000, 2, push)
    training.steps(1)
    assert training.values == 499, "the reply came before its apply point"
    training.steps(2)
    assert training.values == merged - 2


LATER = {"fragment_sync_delay": 2}


def test_worker_describes_itself_the_same_way_on_rejoining(training: ScriptedTraining) -> None:
    about: dict[str, Any] = {"gpu": "a100"}
    training.begins(options={"extra": about})
    about["model"] = {"no message": "changes"}
    training.broker.restart()
    assert training.broker.welcomes(version(0)).extra == {"gpu": "a100"}


def test_message_received_before_the_connection_broke_is_handled(
    training: ScriptedTraining, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the link sees the break first: a poll checks messages before monitors."""
    poll, is_due = zmq.Poller.poll, threading.Event()

    def kind_of(socket: Any) -> Any:
        return socket.type if isinstance(socket, zmq.Socket) else None

    def sees_the_break_alone(self: zmq.Poller, timeout: int | None = None) -> list[Any]:
        ready = poll(self, timeout)
        while is_due.is_set() and zmq.DEALER in map(kind_of, dict(ready)):
            if zmq.PAIR in map(kind_of, dict(ready)):
                is_due.clear()
                return [each for each in ready if kind_of(each[0]) != zmq.DEALER]
            ready = poll(self, 0)
        return ready

    with MessageProxy(broker.address, [Cut(up=False, kind="notice")]) as proxy:
        worker = training.begins(server=proxy.address)
        monkeypatch.setattr(zmq.Poller, "poll", sees_the_break_alone)
        is_due.set()
        broker.says(Notice("shutdown", OVER))
        try:
            wait_for(lambda: worker.should_stop)
        finally:
            is_due.clear()


def test_received_version_is_held_before_it_is_merged(training: ScriptedTraining) -> None:
    training.begins(config=LATER)
    training.steps(H)
    push, _ = training.takes()
    training.brings(1000, 1, push)
    training.broker.restart()
    assert training.broker.welcomes().versions[0] == version(1)
    training.broker.says(Notice("seed", fragment=0))
    seeding, values = training.broker.takes_push()
    assert (seeding.base, first(values)) == (version(1), 1000)
    assert seeding.ledger is not None
    assert seeding.ledger.names_whole("me", push.push_id)
    training.steps(1)
    assert training.values == 100 - H - 1, "its apply point is later"
    training.steps(1)
    assert training.values == 1000


OVER = "The run is over: ann@desk asked for it."


@pytest.mark.parametrize("is_welcome", [True, False])
def test_run_that_is_over_after_a_restart_ends_the_script(
    training: ScriptedTraining, broker: ScriptedBroker, is_welcome: bool
) -> None:
    worker = training.begins()
    assert not worker.should_stop
    broker.says(Notice("restarting", "The broker restarts: it received SIGTERM."))
    wait_for(lambda: training.link.restarting is not None)
    broker.restart()
    if is_welcome:
        broker.welcomes(version(0))
        broker.says(Notice("shutdown", OVER))
    else:
        broker.control, _, _ = broker.hears_from(Join)
        broker.says(Notice("shutdown", OVER))
        broker.says(Error("stopping", "The broker is stopping.", retry=True, about="join"))
    wait_for(lambda: worker.should_stop)
    assert worker.stop_reason == OVER


def test_failing_link_does_not_stop_training_and_can_be_closed(
    training: ScriptedTraining, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = training.begins(timeout=0.1)
    monkeypatch.setattr(Session, "wakes_at", lambda _: 1 / 0)
    training.link.wake()
    training.steps(3 * H)
    assert training.values == 100 - 3 * H
    assert "ZeroDivisionError" in caplog.text
    assert caplog.text.count("Traceback") == 1, "the log is not flooded"
    worker.close()
    assert training.link.has_ended
