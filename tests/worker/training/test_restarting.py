"""A broker that says that it restarts, and one that says that the run is over: what the worker does."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_protocol.messages import Commit, Error, Join, Notice, Push
from diloco_worker import DiLoCoWorker
from kit.scripted_broker import Beside, ScriptedBroker, version
from kit.uniform_model import Make, at, filled, first, until

pytest_plugins = ("kit.worker_fixtures",)

H = 4
RESTARTS = Notice("restarting", "The broker restarts: it received SIGTERM.")


def hears_of_the_restart(broker: ScriptedBroker, worker: DiLoCoWorker) -> None:
    link = worker._link
    assert link is not None
    broker.says(RESTARTS)
    until(lambda: link.restarting is not None)


def test_restart_ends_no_script_and_no_boundary_waits_for_it(
    broker: ScriptedBroker, beside: Beside, begin: Make, caplog: pytest.LogCaptureFixture
) -> None:
    worker, descent = begin()
    steps = beside(descent.steps, H)
    push, _ = broker.takes_push()
    broker.says(RESTARTS)
    steps()
    assert (worker.should_stop, worker.stop_reason) == (False, None)
    broker.close()
    beside(descent.steps, 2 * H)()
    assert at(descent) == 100 - 3 * H
    assert caplog.text.count("steps in flight: the broker restarts") == 1
    assert worker.sync_metrics.unsynced_steps == 3 * H
    broker._open()
    broker.welcomes(version(0))
    again = broker.hears(Push)
    assert (again.push_id, again.base) == (push.push_id, push.base), "the delta is what it was"
    broker.grants(again)
    broker.takes_chunks(again, again.chunks)
    assert broker.hears(Commit).push_id == push.push_id
    broker.serves(filled(descent, 1000), version(1), push.push_id)
    until(lambda: bool(worker._link and worker._link.has_news))
    steps = beside(descent.steps, 1)
    following, delta = broker.takes_push()
    assert (following.base, first(delta)) == (version(1), 2 * H + 1), "boundaries wait again"
    assert beside.is_busy
    broker.serves(filled(descent, 0), version(2), following.push_id)
    steps()
    assert worker.sync_metrics.rounds == 2
    assert not worker.should_stop


def test_run_that_is_over_after_a_restart_ends_the_script(
    broker: ScriptedBroker, begin: Make
) -> None:
    worker, _ = begin()
    hears_of_the_restart(broker, worker)
    broker.restart()
    broker.welcomes(version(0))
    broker.says(Notice("shutdown", "The run is over: ann@desk asked for it."))
    until(lambda: worker.should_stop)
    assert worker.stop_reason == "The run is over: ann@desk asked for it."


def test_end_of_the_run_reaches_a_worker_that_was_coming_back(
    broker: ScriptedBroker, begin: Make
) -> None:
    worker, _ = begin()
    hears_of_the_restart(broker, worker)
    broker.restart()
    broker.control, _, _ = broker.hears_from(Join)
    broker.says(Notice("shutdown", "The run is over: ann@desk asked for it."))
    broker.says(Error("stopping", "The broker is stopping.", retry=True, about="join"))
    until(lambda: worker.should_stop)
    assert worker.stop_reason == "The run is over: ann@desk asked for it."


def test_worker_that_leaves_waits_until_the_broker_is_back(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    steps = beside(descent.steps, H)
    push, _ = broker.takes_push()
    hears_of_the_restart(broker, worker)
    steps()
    leaving = beside(worker.close)
    broker.restart()
    broker.welcomes(version(0))
    again = broker.hears(Push)
    assert again.push_id == push.push_id
    assert beside.is_busy
    broker.grants(again)
    broker.takes_chunks(again, again.chunks)
    broker.serves(filled(descent, 1000), version(1), push.push_id)
    leaving()
    assert worker.sync_metrics.rounds == 1


@pytest.mark.parametrize("is_hasty", [False, True])
def test_delta_that_a_restart_leaves_behind_is_said(
    broker: ScriptedBroker,
    beside: Beside,
    begin: Make,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_hasty: bool,
) -> None:
    """All chunks were in, but in a round that the broker gave up."""
    monkeypatch.setattr("diloco_worker.core.sync.boundary.HASTY_S", 0.3)
    worker, descent = begin(timeout=30.0 if is_hasty else 0.3)
    steps = beside(descent.steps, H)
    broker.takes_push()
    hears_of_the_restart(broker, worker)
    steps()
    if is_hasty:
        worker.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    else:
        worker.close()
    assert f"Leaving with {H} steps in flight" in caplog.text
    assert "the broker restarts and was not back" in caplog.text
    assert "where it counts" not in caplog.text


def test_nothing_is_loaded_while_the_broker_restarts(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    descent.steps(1)
    hears_of_the_restart(broker, worker)
    loaded: Any = beside(worker.load_global)
    assert loaded() is False
    assert beside(worker.force_sync)() is False
    assert at(descent) == 99
