"""Failures: connections that break, a broker that restarts or stops, a link that fails."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import zmq

from diloco_protocol.messages import Chunk, Error, Join, Notice
from diloco_worker.session.session import Session
from kit.proxy import Cut, MessageProxy
from kit.scripted_broker import ScriptedBroker, version
from kit.scripted_training import H, ScriptedTraining
from kit.uniform_model import first, until

pytest_plugins = ("kit.worker_fixtures",)

LATER = {"fragment_sync_delay": 2}

# Connections that break, and silence.


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
            until(lambda: worker.should_stop)
        finally:
            is_due.clear()


# Versions received meanwhile.


def test_received_version_is_held_before_it_is_merged(training: ScriptedTraining) -> None:
    training.begins(config=LATER)
    training.steps(H)
    push, _ = training.takes()
    training.brings(1000, 1, push)
    training.broker.restart()
    assert training.broker.welcomes().versions[0] == version(1)
    training.broker.says(Notice("donate", fragment=0))
    donation, values = training.broker.takes_push()
    assert (donation.base, first(values)) == (version(1), 1000)
    assert donation.ledger is not None
    assert donation.ledger.names_whole("me", push.push_id)
    training.steps(1)
    assert training.values == 100 - H - 1, "its apply point is later"
    training.steps(1)
    assert training.values == 1000


# A broker that restarts, stops, or removes the worker.

OVER = "The run is over: ann@desk asked for it."


def restarts(training: ScriptedTraining) -> None:
    training.broker.says(Notice("restarting", "The broker restarts: it received SIGTERM."))
    until(lambda: training.link.restarting is not None)


@pytest.mark.parametrize("is_welcome", [True, False])
def test_run_that_is_over_after_a_restart_ends_the_script(
    training: ScriptedTraining, broker: ScriptedBroker, is_welcome: bool
) -> None:
    worker = training.begins()
    restarts(training)
    broker.restart()
    if is_welcome:
        broker.welcomes(version(0))
        broker.says(Notice("shutdown", OVER))
    else:
        broker.control, _, _ = broker.hears_from(Join)
        broker.says(Notice("shutdown", OVER))
        broker.says(Error("stopping", "The broker is stopping.", retry=True, about="join"))
    until(lambda: worker.should_stop)
    assert worker.stop_reason == OVER


@pytest.mark.parametrize("stands_at_a_boundary", [False, True])
def test_shutdown_sets_should_stop_and_boundaries_do_not_wait(
    training: ScriptedTraining, broker: ScriptedBroker, stands_at_a_boundary: bool
) -> None:
    worker = training.begins()
    assert not worker.should_stop
    if stands_at_a_boundary:
        training.trains(H)
        training.takes()
    broker.says(Notice("shutdown", "The broker stops."))
    until(lambda: worker.should_stop)
    if not stands_at_a_boundary:
        training.trains(H)
    training.done()
    assert training.values == 100 - H
    began = time.monotonic()
    worker.close()
    assert time.monotonic() - began < 5


# Failures of the link.


def test_chunk_of_wrong_length_is_logged_and_dropped(training: ScriptedTraining) -> None:
    training.begins()
    training.trains(H)
    push, _ = training.takes()
    training.broker.says(Chunk(0, 0, version=version(1)), b"123")
    training.serves(5, 1, push)
    training.done()
    assert training.values == 5
    assert "3 bytes" in str(training.metrics.last_error)


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
