"""A worker in trouble: connections that break, a broker that restarts or stops, a link that fails."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from diloco_protocol import Bitmap, Ledger
from diloco_protocol.messages import Chunk, Error, Join, Notice, Push, Rejoin, Released
from diloco_worker.core.events import RequestVersion
from diloco_worker.core.session import Session
from diloco_worker.shell.link import Link
from kit.scripted_broker import ScriptedBroker, version
from kit.scripted_training import H, ScriptedTraining
from kit.uniform_model import first, until

pytest_plugins = ("kit.worker_fixtures",)

LATER = {"fragment_sync_delay": 2}

# Connections that break, and silence.


def test_push_survives_a_broken_connection_byte_by_byte(training: ScriptedTraining) -> None:
    training.begins()
    training.trains(H)
    push = training.broker.hears(Push)
    training.broker.grants(push, credit=2)
    _, chunk, payload = training.broker.hears_from(Chunk)
    training.broker.restart()
    join = training.broker.welcomes(version(0))
    assert (join.session, join.versions[0]) == ((1).to_bytes(16, "big"), version(0))
    again = training.broker.hears(Push)
    assert (again.push_id, again.base) == (push.push_id, push.base)
    held = Bitmap(push.chunks)
    held.add(chunk.index)
    training.broker.grants(again, held.to_bytes(), credit=3)
    chunks = training.broker.takes_chunks(again, push.chunks - 1)
    assert first(training.broker.decoded(again, {**chunks, chunk.index: payload})) == H
    training.serves(5, 1, push)
    training.done()
    assert training.values == 5
    metrics = training.metrics
    assert (metrics.retries, metrics.reconnections, metrics.rounds) == (1, 1, 1)


def test_what_a_worker_says_of_itself_is_what_it_said_at_first(training: ScriptedTraining) -> None:
    about: dict[str, Any] = {"gpu": "a100"}
    training.begins(extra=about)
    about["model"] = {"no message": "changes"}
    training.broker.restart()
    assert training.broker.welcomes(version(0)).extra == {"gpu": "a100"}


def test_boundary_waits_for_as_long_as_the_broker_shows_signs_of_life(
    training: ScriptedTraining, broker: ScriptedBroker
) -> None:
    training.begins(timeout=0.3)
    training.trains(H)
    push, _ = training.takes()
    end = time.monotonic() + 0.7
    while time.monotonic() < end:
        broker.says(Notice("alive"))
        threading.Event().wait(0.05)
        assert training.stands
    training.serves(5, 1, push)
    training.done()
    assert training.values == 5


def test_training_goes_on_without_a_sign_of_life_and_is_rebased_later(
    training: ScriptedTraining, broker: ScriptedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    training.begins(timeout=0.3)
    training.steps(H)  # nobody answers
    training.steps(H + 2)  # past the next boundary: no second delta
    assert training.values == 100 - H - (H + 2)
    metrics = training.metrics
    assert metrics.unsynced_steps == H + H + 2
    assert "no sign of life" in str(metrics.last_error)
    assert caplog.text.count("Training goes on") == 1, "said once, not at each step"
    push, delta = training.takes()
    assert delta == H, "what was frozen stays as it was"
    broker.hears_nothing_of(Push, 0.1)
    training.brings(1000, 1, push)
    training.trains(1)
    second, later = training.takes()
    assert (second.base, later) == (version(1), H + 3), "the steps since the freeze, on new ground"
    training.serves(0, 2, second)
    training.done()
    assert (training.metrics.rounds, training.metrics.unsynced_steps) == (2, 0)


# Versions that come meanwhile.


def test_version_that_has_come_is_held_before_it_is_merged(training: ScriptedTraining) -> None:
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
    assert training.values == 100 - H - 1, "its apply point has not come"
    training.steps(1)
    assert training.values == 1000


def test_base_is_not_overwritten_before_the_version_that_follows_it_is_merged(
    training: ScriptedTraining,
) -> None:
    worker = training.begins(config=LATER)
    training.steps(H)
    push, _ = training.takes()
    training.brings(1000, 1, push)
    training.link.tell(RequestVersion(0))
    training.serves(2000, 2)
    until(lambda: training.link.arrivals[0].version == version(2))
    assert first(worker._driver._fragments[0].base) == 100  # type: ignore[union-attr]
    training.steps(2)
    assert training.values == 2000


def test_version_that_lacked_the_push_is_still_there_when_the_push_is_dropped(
    training: ScriptedTraining, broker: ScriptedBroker
) -> None:
    training.begins(config=LATER)
    training.steps(H)
    push = broker.hears(Push)
    training.link.tell(RequestVersion(0))
    training.brings(500, 1)
    training.steps(1)  # nobody looks at it: it lacks what is in flight
    training.refuses(push, "late")
    training.hears_news()
    training.steps(1)
    while broker.hears_pull().held_version != version(1):
        pass
    broker.says(Released(0, version(1), Ledger()))  # it is the newest still: no chunk is sent
    training.hears_news()
    training.steps(1)
    assert training.values == 500 - 3


# A broker that restarts, stops, or has no place for the worker any more.

OVER = "The run is over: ann@desk asked for it."


def restarts(training: ScriptedTraining) -> None:
    training.broker.says(Notice("restarting", "The broker restarts: it received SIGTERM."))
    until(lambda: training.link.restarting is not None)


def test_restart_ends_no_script_and_no_boundary_waits_for_it(
    training: ScriptedTraining, broker: ScriptedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    worker = training.begins()
    training.trains(H)
    push, _ = training.takes()
    restarts(training)
    training.done()
    assert (worker.should_stop, worker.stop_reason) == (False, None)
    assert worker.load_global() is worker.force_sync() is False
    broker.close()
    training.steps(2 * H)
    assert training.values == 100 - 3 * H
    assert caplog.text.count("steps in flight: the broker restarts") == 1
    assert training.metrics.unsynced_steps == 3 * H
    broker._open()
    broker.welcomes(version(0))
    again, _ = training.takes()
    assert (again.push_id, again.base) == (push.push_id, push.base), "the delta is what it was"
    training.brings(1000, 1, push)
    training.trains(1)
    following, delta = training.takes()
    assert (following.base, delta) == (version(1), 2 * H + 1), "boundaries wait again"
    assert training.stands
    training.serves(0, 2, following)
    training.done()
    assert (training.metrics.rounds, worker.should_stop) == (2, False)


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


def test_worker_that_leaves_waits_until_the_broker_is_back(training: ScriptedTraining) -> None:
    worker = training.begins()
    training.trains(H)
    push, _ = training.takes()
    restarts(training)
    training.done()
    training.does(worker.close)
    training.broker.restart()
    training.broker.welcomes(version(0))
    again, _ = training.takes()
    assert again.push_id == push.push_id
    assert training.stands
    training.serves(1000, 1, push)
    training.done()
    assert training.metrics.rounds == 1


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


def test_refusal_in_mid_run_is_shown_and_training_goes_on(training: ScriptedTraining) -> None:
    training.begins()
    training.trains(H)
    training.broker.hears(Push)
    training.broker.says(Rejoin("another epoch"))
    training.broker.control, _, _ = training.broker.hears_from(Join)
    training.broker.says(Error("run_differs", "This is another run.", about="join"))
    training.done()
    assert training.values == 100 - H
    assert "This is another run." in str(training.metrics.last_error)


# What goes wrong in the link.


def test_chunk_of_wrong_length_is_said_aloud_and_not_used(training: ScriptedTraining) -> None:
    training.begins()
    training.trains(H)
    push, _ = training.takes()
    training.broker.says(Chunk(0, 0, version=version(1)), b"123")
    training.serves(5, 1, push)
    training.done()
    assert training.values == 5
    assert "3 bytes instead of 16" in str(training.metrics.last_error)


def test_link_starts_again_however_often_it_fails(
    training: ScriptedTraining, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_worker.shell.link.LONGEST_FAILURE_PAUSE_S", 0.001)
    connect, wakes_at = Link.connect, Session.wakes_at
    failures = iter(range(2))

    def connect_later(self: Link, place: int = 0) -> None:
        if next(failures, None) is not None:
            raise OSError("too many open files")
        connect(self, place)

    monkeypatch.setattr(Link, "connect", connect_later)
    training.begins()  # it fails from the start
    attempts = iter(range(50))

    def explode(self: Session) -> float | None:
        if next(attempts, None) is not None:
            raise ZeroDivisionError("unexpected")
        return wakes_at(self)

    monkeypatch.setattr(Session, "wakes_at", explode)
    training.link.wake()
    training.trains(H)
    broker.welcomes(version(0))
    push, _ = training.takes()
    training.serves(5, 1, push)
    training.done()
    assert (training.values, next(attempts, None)) == (5, None)


def test_link_that_always_fails_lets_training_go_on_and_can_be_closed(
    training: ScriptedTraining, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = training.begins(timeout=0.1)
    monkeypatch.setattr(Session, "wakes_at", lambda _: 1 / 0)
    training.link.wake()
    training.steps(3 * H)
    assert training.values == 100 - 3 * H
    assert "ZeroDivisionError" in caplog.text
    assert caplog.text.count("Traceback") == 1, "the log is not filled"
    worker.close()
    assert training.link.has_ended
