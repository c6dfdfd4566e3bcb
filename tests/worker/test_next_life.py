"""A worker resumes from its checkpoint, message by message."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_protocol import Bitmap
from diloco_protocol.messages import Error, Push
from kit.scripted_broker import RUN, ScriptedBroker, run_config, version
from kit.scripted_training import H, ScriptedTraining

pytest_plugins = ("kit.worker_fixtures",)

STRANGER = 0xABC  # an unknown push


def test_resumed_worker_joins_with_held_versions_within_its_cycle(
    training: ScriptedTraining,
) -> None:
    training.begins()
    training.steps(2)
    join = training.resumes(training.saves(), version(0), worker_id=None)
    assert (join.run, join.session, join.worker_id) == (RUN, None, "me")
    assert training.worker.worker_id == "me", "its former id"
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


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("flight_counted", [False, True])
def test_steps_pushed_by_a_later_incarnation_are_superseded(
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
    training.resumes(training.saves(), version(3), options={"audit": audit})
    broker.hears_pull()
    counted = [*(ids if flight_counted else []), STRANGER]
    has_version_of(training, 500, 3, *counted)
    training.done()
    assert training.values == 500
    lost = 2 if not in_flight else 1 if flight_counted else H + 1
    assert f"{lost} steps of fragment 0" in caplog.text
    assert training.worker.sync_count == (in_flight and flight_counted)
    written = audit.read_text()
    assert ('"counted"' in written) == (in_flight and flight_counted)
    assert ('"superseded"' in written) == (in_flight and not flight_counted)
    left = H - 1 if in_flight else 2
    training.steps(left)
    push, delta = training.takes()  # nothing is in doubt: offered without asking
    assert (push.base, push.steps, delta) == (version(3), left, left)


def has_version_of(training: ScriptedTraining, value: float, counter: int, *counted: int) -> None:
    """Serve a version that contains these pushes."""
    state = training.filled(value)
    training.broker.serves(state, version(counter), *counted)


@pytest.mark.parametrize("is_another_run", [False, True])
def test_changed_or_other_run_is_joined_as_a_new_worker(
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
def test_worker_with_another_id_or_no_parameters_resumes_only_counters(
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
