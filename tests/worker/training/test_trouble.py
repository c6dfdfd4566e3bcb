"""A worker in trouble: connections that break, deltas that are refused, a broker that stops."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from diloco_protocol import Bitmap, Ledger
from diloco_protocol.messages import (
    Chunk,
    Error,
    Grant,
    Join,
    Notice,
    Pull,
    Push,
    Rejoin,
    Released,
    Standing,
)
from diloco_worker.core.uploads import Uploads
from diloco_worker.shell.repeated_lines import SENTENCES
from kit.scripted_broker import Beside, ScriptedBroker, run_config, version
from kit.uniform_model import Make, at, filled, first, until

pytest_plugins = ("kit.worker_fixtures",)

H = 4


def test_push_survives_a_broken_connection_byte_by_byte(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    steps = beside(descent.steps, H)
    push = broker.hears(Push)
    broker.grants(push, credit=2)
    _, chunk, payload = broker.hears_from(Chunk)
    broker.restart()
    join = broker.welcomes(version(0))
    assert join.session == (1).to_bytes(16, "big")
    assert join.versions[0] == version(0)
    again = broker.hears(Push)
    assert (again.push_id, again.base) == (push.push_id, push.base)
    held = Bitmap(push.chunks)
    held.add(chunk.index)
    broker.grants(again, held.to_bytes(), credit=3)
    chunks = broker.takes_chunks(again, push.chunks - 1)
    assert first(broker.decoded(again, {**chunks, chunk.index: payload})) == H
    broker.serves(filled(descent, 5), version(1), push.push_id)
    steps()
    assert at(descent) == 5
    assert (worker.sync_metrics.retries, worker.sync_metrics.reconnections) == (1, 1)
    assert worker.sync_metrics.rounds == 1


def test_push_that_was_counted_before_the_connection_broke_is_not_sent_again(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    _, descent = begin()
    steps = beside(descent.steps, H)
    push, _ = broker.takes_push()
    broker.restart()
    broker.welcomes(version(1))
    again = broker.hears(Push)
    broker.says(Grant(again.push_id, 0, Standing.COUNTED))
    broker.serves(filled(descent, 5), version(1), push.push_id)
    steps()
    assert at(descent) == 5
    broker.hears_nothing_of(Chunk, 0.1)


def test_boundary_waits_for_as_long_as_the_broker_shows_signs_of_life(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    _, descent = begin(timeout=0.5)
    steps = beside(descent.steps, H)
    push, _ = broker.takes_push()
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        broker.says(Notice("alive"))
        threading.Event().wait(0.1)
        assert beside.is_busy
    broker.serves(filled(descent, 5), version(1), push.push_id)
    steps()
    assert at(descent) == 5


def test_training_goes_on_without_a_sign_of_life_and_is_rebased_later(
    broker: ScriptedBroker, beside: Beside, begin: Make, caplog: pytest.LogCaptureFixture
) -> None:
    worker, descent = begin(timeout=0.3)
    beside(descent.steps, H)()  # nobody answers
    assert at(descent) == 100 - H
    beside(descent.steps, H + 2)()  # past the next boundary: no second delta
    assert at(descent) == 100 - H - (H + 2)
    metrics = worker.sync_metrics
    assert metrics.unsynced_steps == H + H + 2
    assert "no sign of life" in str(metrics.last_error)
    assert caplog.text.count("Training goes on") == 1, "said once, not at each step"
    push, delta = broker.takes_push()
    assert first(delta) == H, "what was frozen stays as it was"
    broker.hears_nothing_of(Push, 0.1)
    broker.serves(filled(descent, 1000), version(1), push.push_id)
    until(lambda: bool(worker._link and worker._link.has_news))
    steps = beside(descent.steps, 1)
    second, later = broker.takes_push()
    assert second.base == version(1)
    assert first(later) == H + 3, "the steps since the freeze, on new ground"
    broker.serves(filled(descent, 0), version(2), second.push_id)
    steps()
    assert worker.sync_metrics.rounds == 2
    assert worker.sync_metrics.unsynced_steps == 0


def test_rebase_puts_later_steps_on_the_new_parameters(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin(timeout=0.3)
    beside(descent.steps, H + 1)()
    push, _ = broker.takes_push()
    broker.serves(filled(descent, 1000), version(1), push.push_id)
    until(lambda: bool(worker._link and worker._link.has_news))
    beside(descent.steps, 1)()
    assert at(descent) == 1000 - 2


def test_counted_delta_is_not_forgotten_when_a_still_newer_version_comes(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin(timeout=0.3)
    beside(descent.steps, H + 1)()  # nobody answers
    push, _ = broker.takes_push()
    broker.serves(filled(descent, 500), version(1), push.push_id)
    link = worker._link
    assert link is not None
    until(lambda: link.has_news)
    broker.restart()
    broker.welcomes(version(5))
    broker.hears_pull()
    broker.serves(filled(descent, 1000), version(5))
    until(lambda: link.arrivals[0].version == version(5))
    beside(descent.steps, 1)()
    assert at(descent) == 1000 - 2
    assert worker.sync_metrics.rounds == 1


def test_load_global_with_a_delta_in_flight_is_the_ground_of_later_steps(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin(timeout=0.3)
    beside(descent.steps, H)()  # nobody answers: the delta stays in flight
    push = broker.hears(Push)
    broker.says(Notice("alive"))
    until(lambda: worker._link is not None and (worker._link.silence() or 1) < 0.2)
    loaded = beside(worker.load_global)
    while broker.hears_pull().held is None:
        pass
    broker.serves(filled(descent, 500), version(1))
    assert loaded() is True
    assert at(descent) == 500
    beside(descent.steps, 1)()
    broker.serves(filled(descent, 1000), version(2), push.push_id)
    until(lambda: bool(worker._link and worker._link.has_news))
    beside(descent.steps, 1)()
    assert at(descent) == 1000 - 2
    assert worker.sync_metrics.rounds == 1


def test_values_that_are_being_donated_are_not_overwritten_by_later_versions(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    _, descent = begin()
    broker.says(Notice("donate", fragment=0))
    donation = broker.hears(Push)
    for counter in (1, 2, 3):
        steps = beside(descent.steps, H)
        push, _ = broker.takes_push()
        broker.serves(filled(descent, counter), version(counter), push.push_id)
        steps()
    broker.grants(donation)
    values = broker.decoded(donation, broker.takes_chunks(donation, donation.chunks))
    assert (donation.base, first(values)) == (version(0), 100)


def test_version_that_has_come_is_held_before_it_is_merged(
    broker: ScriptedBroker, begin: Make
) -> None:
    broker.config = run_config(fragment_sync_delay=2)
    worker, descent = begin()
    descent.steps(H)
    push, _ = broker.takes_push()
    broker.serves(filled(descent, 1000), version(1), push.push_id)
    until(lambda: bool(worker._link and worker._link.has_news))
    broker.restart()
    join = broker.welcomes()
    assert join.versions[0] == version(1)
    broker.says(Notice("donate", fragment=0))
    donation, values = broker.takes_push()
    assert (donation.base, first(values)) == (version(1), 1000)
    assert donation.ledger is not None
    assert donation.ledger.names_whole("me", push.push_id)
    descent.steps(1)
    assert at(descent) == 100 - H - 1, "its apply point has not come"
    descent.steps(1)
    assert at(descent) == 1000


def test_base_is_not_overwritten_before_the_version_that_follows_it_is_merged(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    broker.config = run_config(fragment_sync_delay=2)
    worker, descent = begin()
    descent.steps(H)
    push, _ = broker.takes_push()
    broker.serves(filled(descent, 1000), version(1), push.push_id)
    until(lambda: bool(worker._link and worker._link.has_news))
    assert worker._link is not None
    worker._link.request_version(0)
    broker.serves(filled(descent, 2000), version(2))
    until(lambda: worker._link is not None and worker._link.arrivals[0].version == version(2))
    base = worker._driver._fragments[0].base  # type: ignore[union-attr]
    assert first(base) == 100
    descent.steps(2)
    assert at(descent) == 2000


def test_version_that_lacked_the_push_is_still_there_when_the_push_is_dropped(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    broker.config = run_config(fragment_sync_delay=2)
    worker, descent = begin()
    link = worker._link
    assert link is not None
    descent.steps(H)
    push = broker.hears(Push)
    link.request_version(0)
    broker.serves(filled(descent, 500), version(1))
    until(lambda: link.has_news)
    descent.steps(1)  # nobody looks at it: it lacks what is in flight
    broker.says(Error("late", "Too late.", push_id=push.push_id, about="push"))
    until(lambda: link.has_news)
    descent.steps(1)
    while broker.hears_pull().held_version != version(1):
        pass
    broker.says(Released(0, version(1), Ledger()))  # it is the newest still: no chunk is sent
    until(lambda: link.has_news)
    descent.steps(1)
    assert at(descent) == 500 - 3


def test_what_is_told_of_a_push_is_forgotten_with_it(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    link = worker._link
    assert link is not None
    steps = beside(descent.steps, H)
    push, _ = broker.takes_push()
    until(lambda: link.uploaded == {push.push_id})
    broker.serves(filled(descent, 5), version(1), push.push_id)
    steps()
    until(lambda: not link.uploaded)


def test_so_many_sentences_are_remembered_and_no_more(begin: Make) -> None:
    worker, _ = begin()
    link = worker._link
    assert link is not None
    link.close()
    for number in range(3 * SENTENCES):
        link._io.say(f"Sentence {number}.")
    assert len(link._io.said) == SENTENCES
    assert f"Sentence {3 * SENTENCES - 1}." in link._io.said


def test_connection_that_breaks_too_often_lets_training_go_on(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin(max_sync_retries=1)
    steps = beside(descent.steps, H)
    for _ in range(2):
        broker.hears(Push)
        broker.restart()
        broker.welcomes(version(0))
    steps()
    assert at(descent) == 100 - H
    assert worker.sync_metrics.retries == 2
    assert "broke 2 times" in str(worker.sync_metrics.last_error)


def test_delta_that_is_not_finite_is_never_sent_and_the_model_is_restored(
    broker: ScriptedBroker, beside: Beside, begin: Make, caplog: pytest.LogCaptureFixture
) -> None:
    worker, descent = begin()
    beside(descent.steps, 1)()
    with torch.no_grad():
        next(descent.model.parameters()).view(-1)[0] = float("nan")
    beside(descent.steps, H - 1)()
    assert at(descent) == 100
    metrics = worker.sync_metrics
    assert (metrics.rejected, metrics.rounds) == (1, 0)
    assert "not finite in weight" in str(metrics.last_error)
    assert "not finite in weight" in caplog.text
    steps = beside(descent.steps, H)
    push, delta = broker.takes_push()
    assert first(delta) == H
    broker.serves(filled(descent, 5), version(1), push.push_id)
    steps()
    assert worker.sync_metrics.rounds == 1


def test_push_that_the_broker_refuses_is_dropped_and_training_goes_on(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    steps = beside(descent.steps, H)
    push = broker.hears(Push)
    broker.says(Error("bad_push", "The weight is odd.", push_id=push.push_id, about="push"))
    steps()
    assert at(descent) == 100
    assert worker.sync_metrics.rejected == 1
    steps = beside(descent.steps, H)
    push, delta = broker.takes_push()
    assert first(delta) == H
    broker.serves(filled(descent, 5), version(1), push.push_id)
    steps()


def test_shutdown_sets_should_stop_and_boundaries_do_not_wait(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    assert not worker.should_stop
    broker.says(Notice("shutdown", "The broker stops."))
    until(lambda: worker.should_stop)
    beside(descent.steps, H)()
    assert at(descent) == 100 - H
    began = time.monotonic()
    worker.close()
    assert time.monotonic() - began < 5


def test_shutdown_wakes_a_boundary_that_waits(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    steps = beside(descent.steps, H)
    broker.takes_push()
    broker.says(Notice("shutdown", "The broker stops."))
    steps()
    assert worker.should_stop


def test_refusal_in_mid_run_is_shown_and_training_goes_on(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    steps = beside(descent.steps, H)
    broker.hears(Push)
    broker.says(Rejoin("another epoch"))
    broker.control, _, _ = broker.hears_from(Join)
    broker.says(Error("run_differs", "This is another run.", about="join"))
    steps()
    assert at(descent) == 100 - H
    assert "This is another run." in str(worker.sync_metrics.last_error)


def test_chunk_of_wrong_length_is_said_aloud_and_not_used(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    steps = beside(descent.steps, H)
    push, _ = broker.takes_push()
    broker.says(Chunk(0, 0, version=version(1)), b"123")
    broker.serves(filled(descent, 5), version(1), push.push_id)
    steps()
    assert at(descent) == 5
    assert "3 bytes instead of 16" in str(worker.sync_metrics.last_error)


def test_unexpected_trouble_in_the_link_costs_a_connection_and_nothing_else(
    broker: ScriptedBroker, beside: Beside, begin: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, descent = begin()
    monkeypatch.setattr("diloco_worker.shell.io_thread.FAILURE_PAUSE_S", 0.01)
    original = Uploads.granted

    def explode(self: Uploads, *_: object) -> Any:
        monkeypatch.setattr(Uploads, "granted", original)
        raise ZeroDivisionError("nobody expected this")

    monkeypatch.setattr(Uploads, "granted", explode)
    steps = beside(descent.steps, H)
    push = broker.hears(Push)
    broker.grants(push)
    broker.welcomes(version(0))
    again, _ = broker.takes_push()
    assert again.push_id == push.push_id
    broker.serves(filled(descent, 5), version(1), push.push_id)
    steps()
    assert at(descent) == 5


def test_link_that_fails_for_good_never_stops_the_training(
    broker: ScriptedBroker, beside: Beside, begin: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, descent = begin()
    monkeypatch.setattr("diloco_worker.shell.io_thread.MAX_FAILURES", 1)
    monkeypatch.setattr(Uploads, "granted", lambda *_: 1 / 0)
    steps = beside(descent.steps, H)
    broker.grants(broker.hears(Push))
    steps()
    beside(descent.steps, 3 * H)()
    assert at(descent) == 100 - 4 * H
    assert worker.sync_metrics.unsynced_steps == 4 * H
    assert "ZeroDivisionError" in str(worker.sync_metrics.last_error) or "link has ended" in str(
        worker.sync_metrics.last_error
    )


def test_newer_version_after_coming_back_moves_the_ground_under_local_steps(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    beside(descent.steps, 2)()
    broker.restart()
    broker.welcomes(version(6))
    broker.hears(Pull)
    broker.serves(filled(descent, 50), version(6))
    until(lambda: bool(worker._link and worker._link.has_news))
    beside(descent.steps, 1)()
    assert at(descent) == 50 - 3
    steps = beside(descent.steps, 1)
    push, delta = broker.takes_push()
    assert (push.base, first(delta)) == (version(6), 4)
    broker.serves(filled(descent, 5), version(7), push.push_id)
    steps()


def test_version_that_lacks_the_push_is_not_taken(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    _, descent = begin()
    steps = beside(descent.steps, H)
    push, _ = broker.takes_push()
    broker.serves(filled(descent, 5), version(1))
    while broker.hears_pull().after != 1:
        pass
    assert beside.is_busy
    assert at(descent) == 100 - H
    broker.serves(filled(descent, 6), version(2), push.push_id)
    steps()
    assert at(descent) == 6
