"""The hook and its link against a broker that follows a script, over real sockets."""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from worker_fakes import (
    Beside,
    Descent,
    ScriptedBroker,
    changed,
    equal,
    run_config,
    scripted_broker,
    version,
)

from diloco_protocol import Bitmap, Kind, Refused, Segment, UsageError
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.messages import (
    Chunk,
    Error,
    Grant,
    Heartbeat,
    Join,
    Leave,
    Notice,
    Pull,
    Purpose,
    Push,
    Rejoin,
    Standing,
    Welcome,
)
from diloco_worker import DiLoCoWorker
from diloco_worker.pushes import Pushes
from diloco_worker.snapshot import FlatState

H = 4


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with scripted_broker() as made:
        yield made


@pytest.fixture
def beside() -> Iterator[Beside]:
    made = Beside()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DILOCO_SERVER", raising=False)


@pytest.fixture
def workers() -> Iterator[list[DiLoCoWorker]]:
    """Workers that are closed at once after the test, whatever became of it."""
    made: list[DiLoCoWorker] = []
    yield made
    for worker in made:
        worker.close(failed=True)


Make = Callable[..., tuple[DiLoCoWorker, Descent]]


@pytest.fixture
def make(broker: ScriptedBroker, workers: list[DiLoCoWorker]) -> Make:
    def made(model: nn.Module | None = None, **keywords: Any) -> tuple[DiLoCoWorker, Descent]:
        descent = Descent(model)
        keywords = {"server": broker.address, "worker_id": "me", **keywords}
        worker = DiLoCoWorker(descent.model, descent.optimizer, **keywords)
        workers.append(worker)
        return worker, descent

    return made


@pytest.fixture
def begin(broker: ScriptedBroker, beside: Beside, make: Make) -> Make:
    """A worker that has joined and whose model is at version 0: all values 100."""

    def begun(model: nn.Module | None = None, **keywords: Any) -> tuple[DiLoCoWorker, Descent]:
        worker, descent = make(model, **keywords)
        started = beside(worker.start)
        broker.welcomes(version(0))
        broker.hears_pull(0)
        frozen = descent.values(fragment=1, chunk_elements=broker.config.chunk_elements)
        if frozen.layout.chunks:
            broker.hears_pull(1)
            broker.serves(changed(frozen, torch.zeros_like), version(0))
        broker.serves(hundred(descent, broker), version(0))
        assert started() is worker
        return worker, descent

    return begun


def hundred(descent: Descent, broker: ScriptedBroker) -> FlatState:
    now = descent.values(chunk_elements=broker.config.chunk_elements)
    return changed(now, lambda vector: torch.full_like(vector, 100))


def first(state: FlatState) -> float:
    """The value of the parameters, which are all the same."""
    vector = state.vectors[Segment.PARAMETERS]
    assert bool((vector == vector[0]).all())
    return float(vector[0])


def at(descent: Descent) -> float:
    return first(descent.values())


def filled(descent: Descent, value: float) -> FlatState:
    return changed(descent.values(), lambda vector: torch.full_like(vector, value))


# A healthy run.


def test_joining_puts_the_global_parameters_into_the_model(begin: Make) -> None:
    worker, descent = begin()
    assert at(descent) == 100
    assert worker.config == run_config()
    assert worker.sync_metrics.rounds == 0


def test_boundary_pushes_global_minus_local_and_takes_the_new_parameters(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    for number in range(1, 4):
        steps = beside(descent.steps, H)
        push, delta = broker.takes_push()
        assert first(delta) == H, "the delta is measured from the newest version"
        assert (push.steps, push.base, push.purpose) == (H, version(number - 1), Purpose.GRADIENT)
        assert push.norm == pytest.approx(12**0.5 * H)
        assert beside.is_busy, "training waits for its round"
        broker.serves(filled(descent, 100 * (number + 1)), version(number), push.push_id)
        steps()
        assert at(descent) == 100 * (number + 1)
    metrics = worker.sync_metrics
    assert (metrics.rounds, metrics.rejected, metrics.retries, metrics.unsynced_steps) == (
        3,
        0,
        0,
        0,
    )
    assert metrics.bytes_up > 3 * 48 < metrics.bytes_down
    assert metrics.seconds_waited > 0
    assert metrics.last_error is None


def test_nothing_is_pushed_before_the_boundary(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    _, descent = begin()
    beside(descent.steps, H - 1)()
    assert at(descent) == 100 - (H - 1)
    broker.hears_nothing_of(Push, 0.2)


@pytest.mark.parametrize("chunk_elements", [1, 7, 1000])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16"])
def test_buffers_ties_and_dtypes_survive_the_whole_way(
    beside: Beside, chunk_elements: int, wire: str
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, dtype=torch.bfloat16)
            self.norm = nn.BatchNorm1d(4)
            self.head = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
            self.head.weight = self.inner.weight
            self.frozen = nn.Linear(2, 2).requires_grad_(False)

    torch.manual_seed(0)
    config = {"chunk_elements": chunk_elements, "wire_dtype": wire, "reply_dtype": "bf16"}
    with scripted_broker(**config) as broker:
        descent = Descent(Net())
        theirs = Descent(Net())
        worker = DiLoCoWorker(
            descent.model, descent.optimizer, server=broker.address, worker_id="me"
        )
        started = beside(worker.start)
        join = broker.welcomes(version(0))
        assert {e.kind for e in join.manifest.entries} == set(Kind)
        zero = theirs.values(0, chunk_elements)
        broker.serves(zero, version(0))
        broker.serves(theirs.values(1, chunk_elements), version(0))
        started()
        for name, value in theirs.model.state_dict().items():
            expected = value
            if name in ("norm.weight", "norm.bias"):
                expected = value.bfloat16().float()
            assert torch.equal(descent.model.state_dict()[name], expected), name
        with torch.no_grad():
            descent.model.state_dict()["norm.running_mean"].add_(0.5)
            descent.model.state_dict()["norm.num_batches_tracked"].add_(9)
        steps = beside(descent.steps, H)
        push, delta = broker.takes_push()
        assert push.wire_dtype == wire
        assert set(delta.vectors[Segment.BUFFERS].tolist()) == {-0.5, 0.0}
        assert delta.vectors[Segment.INTEGERS].tolist() == [9]
        local = descent.values(0, chunk_elements).vectors[Segment.PARAMETERS]
        base = zero.vectors[Segment.PARAMETERS].bfloat16().float()
        expected_delta = (base - local).to(getattr(torch, _TORCH[wire])).float()
        assert torch.equal(delta.vectors[Segment.PARAMETERS], expected_delta)
        broker.serves(zero, version(1), push.push_id)
        steps()
        assert descent.model.state_dict()["norm.num_batches_tracked"] == 0
        worker.close()


_TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def test_fresh_worker_donates_its_parameters_when_asked(
    broker: ScriptedBroker, beside: Beside, make: Make
) -> None:
    worker, descent = make()
    before = descent.values()
    started = beside(worker.start)
    broker.welcomes()
    broker.says(Notice("donate", fragment=0))
    push, values = broker.takes_push()
    assert (push.purpose, push.base, push.wire_dtype) == (Purpose.DONATION, None, "fp32")
    assert equal(values, before)
    broker.serves(values, version(0))
    started()
    assert equal(descent.values(), before)


def test_worker_donates_the_global_values_not_its_local_ones(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    _, descent = begin()
    beside(descent.steps, H - 1)()
    broker.says(Rejoin("new epoch"))
    broker.welcomes()
    broker.says(Notice("donate", fragment=0))
    push, values = broker.takes_push()
    assert push.base == version(0)
    assert first(values) == 100


def test_heartbeats_tell_how_training_stands(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()

    def train() -> None:
        for _ in range(3):
            descent.steps(1)
            worker.report(loss=torch.tensor(2.5, requires_grad=True), tokens=10, note="x")

    beside(train)()
    beside(descent.steps, 0)()
    worker.report(tokens=5)
    beside(descent.steps, 1)
    push, _ = broker.takes_push()
    assert (push.tokens, push.loss) == (35, 2.5)
    broker.says(Notice("ping"))
    beat = broker.hears(Heartbeat)
    assert (beat.step, beat.inner_step, beat.state) == (4, 0, "waiting")
    assert (beat.loss, beat.tokens) == (2.5, 35)
    assert beat.steps_per_s is not None
    assert worker.reported == {"note": "x"}
    broker.serves(filled(descent, 1), version(1), push.push_id)


def test_heartbeats_come_by_themselves(beside: Beside) -> None:
    with scripted_broker(heartbeat_timeout=0.6) as broker:
        descent = Descent()
        worker = DiLoCoWorker(
            descent.model, descent.optimizer, server=broker.address, worker_id="me"
        )
        started = beside(worker.start)
        broker.welcomes(version(0))
        broker.serves(filled(descent, 100), version(0))
        started()
        for _ in range(3):
            broker.hears(Heartbeat, patience=5)
        worker.close(failed=True)


def test_report_refuses_a_tensor_of_many_values(begin: Make) -> None:
    worker, _ = begin()
    with pytest.raises(UsageError, match=r"loss.*\[2\]"):
        worker.report(loss=torch.zeros(2))


def test_force_sync_makes_the_boundary_now(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    beside(descent.steps, 2)()
    forced = beside(worker.force_sync)
    push, delta = broker.takes_push()
    assert (push.steps, first(delta)) == (2, 2)
    broker.serves(filled(descent, 7), version(1), push.push_id)
    assert forced() is True
    assert at(descent) == 7
    beside(descent.steps, H - 1)()
    broker.hears_nothing_of(Push, 0.1)


def test_load_global_puts_the_newest_version_into_the_model(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    beside(descent.steps, 2)()
    loaded = beside(worker.load_global)
    broker.hears_pull()
    broker.serves(filled(descent, 55), version(3))
    assert loaded() is True
    assert at(descent) == 55
    steps = beside(descent.steps, H)
    push, delta = broker.takes_push()
    assert (push.base, first(delta)) == (version(3), H)
    broker.serves(filled(descent, 1), version(4), push.push_id)
    steps()


def test_load_global_of_the_version_held_needs_no_chunk(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    beside(descent.steps, 2)()
    loaded = beside(worker.load_global)
    pull = broker.hears_pull()
    assert (pull.held_version, pull.after) == (version(0), -1)
    assert pull.held is not None
    assert Bitmap.from_bytes(pull.held, 3).is_full
    broker.serves(FlatState(_without_chunks(descent), {}), version(0))
    assert loaded() is True
    assert at(descent) == 100


def _without_chunks(descent: Descent) -> FragmentLayout:
    return dataclasses.replace(descent.values().layout, spans=())


# Leaving.


def test_leaving_tells_the_broker_and_leaves_the_model_as_it_is(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    beside(descent.steps, 2)()
    worker.close()
    broker.hears(Leave, patience=5)
    assert at(descent) == 98
    descent.steps(10)
    assert worker.local_step == 2, "the hook is gone"
    worker.close()


def test_error_in_the_body_leaves_at_once(
    broker: ScriptedBroker, beside: Beside, make: Make
) -> None:
    worker, descent = make(timeout=60.0)

    def train() -> None:
        with worker:
            descent.steps(1)
            raise KeyError("mine")

    training = beside(train)
    broker.welcomes(version(0))
    broker.serves(filled(descent, 100), version(0))
    with pytest.raises(KeyError, match="mine"):
        training()
    assert "error" in broker.hears(Leave, patience=5).reason


def test_close_never_hangs_without_a_broker(
    make: Make, broker: ScriptedBroker, begin: Make
) -> None:
    worker, _ = begin()
    broker.close()
    began = time.monotonic()
    worker.close()
    assert time.monotonic() - began < 5
    assert not [t for t in threading.enumerate() if t.name == "diloco-link" and t.is_alive()]


def test_without_a_server_everything_is_a_no_op() -> None:
    descent = Descent()
    with DiLoCoWorker(descent.model, descent.optimizer) as worker:
        before = copy.deepcopy(descent.model.state_dict())
        worker.report(loss=1.0, tokens=3)
        assert worker.force_sync() is False
        assert worker.load_global() is False
        assert worker.should_stop is False
        state = worker.state_dict()
        descent.steps(2)
    for name, value in descent.model.state_dict().items():
        assert torch.allclose(value, before[name] - 2)
    assert dict(worker.sync_metrics)["rounds"] == 0
    DiLoCoWorker(descent.model, descent.optimizer).load_state_dict(state)


def test_counters_go_on_from_a_checkpoint(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    steps = beside(descent.steps, H)
    push, _ = broker.takes_push()
    broker.serves(filled(descent, 1), version(1), push.push_id)
    steps()
    state = worker.state_dict()
    assert (state["local_step"], state["sync_count"]) == (H, 1)
    other = DiLoCoWorker(descent.model, descent.optimizer)
    other.load_state_dict(copy.deepcopy(state))
    assert other.state_dict() == state
    assert (other.local_step, other.sync_count) == (H, 1)
    with pytest.raises(UsageError, match="before"):
        worker.load_state_dict(state)
    with pytest.raises(UsageError, match="no state"):
        other.load_state_dict({"steps": 1})


# Being refused, waiting.


def test_refusal_is_raised_with_the_brokers_sentence(
    broker: ScriptedBroker, beside: Beside, make: Make
) -> None:
    worker, _ = make(sync_every=9)
    started = beside(worker.start)
    broker.control, join, _ = broker.hears_from(Join)
    assert join.wants == {"sync_every": 9}
    broker.says(Error("config_differs", "You ask for sync_every=9, the run has 4."))
    with pytest.raises(Refused, match="sync_every=9, the run has 4"):
        started()


def test_heartbeats_off_are_refused_where_the_broker_wants_them(
    broker: ScriptedBroker, beside: Beside, make: Make
) -> None:
    worker, _ = make(heartbeat_interval=0)
    started = beside(worker.start)
    broker.control, _, _ = broker.hears_from(Join)
    broker.says(Welcome(b"s" * 16, "epoch", broker.config, 0))
    with pytest.raises(Refused, match="heartbeat_interval 0"):
        started()


def test_worker_waits_for_a_broker_that_starts_later_and_says_so(
    beside: Beside, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_worker.hook.FIRST_WORD_S", 0.0)
    caplog.set_level(logging.INFO, "diloco.worker")
    probe = ScriptedBroker()
    address = probe.address
    probe.close()
    descent = Descent()
    worker = DiLoCoWorker(descent.model, descent.optimizer, server=address, worker_id="me")
    started = beside(worker.start)
    deadline = time.monotonic() + 10
    while f"no broker answers at {address}" not in caplog.text and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    assert f"no broker answers at {address}" in caplog.text
    late = ScriptedBroker(address)
    try:
        late.welcomes(version(0))
        late.serves(filled(descent, 3), version(0))
        started()
        assert at(descent) == 3
    finally:
        worker.close(failed=True)
        late.close()


def test_model_that_cannot_be_exchanged_is_refused_before_anything_is_sent() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)
    with pytest.raises(UsageError, match="no trainable parameters"):
        DiLoCoWorker(model, optimizer, server="tcp://127.0.0.1:1")


# Trouble.


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
    _until(lambda: bool(worker._link and worker._link.has_news))
    steps = beside(descent.steps, 1)
    second, later = broker.takes_push()
    assert second.base == version(1)
    assert first(later) == H + 3, "the steps since the freeze, on new ground"
    broker.serves(filled(descent, 0), version(2), second.push_id)
    steps()
    assert worker.sync_metrics.rounds == 2
    assert worker.sync_metrics.unsynced_steps == 0


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_rebase_puts_later_steps_on_the_new_parameters(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin(timeout=0.3)
    beside(descent.steps, H + 1)()
    push, _ = broker.takes_push()
    broker.serves(filled(descent, 1000), version(1), push.push_id)
    _until(lambda: bool(worker._link and worker._link.has_news))
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
    _until(lambda: link.has_news)
    broker.restart()
    broker.welcomes(version(5))
    broker.hears_pull()
    broker.serves(filled(descent, 1000), version(5))
    _until(lambda: link.arrivals[0].version == version(5))
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
    _until(lambda: worker._link is not None and (worker._link.silence() or 1) < 0.2)
    loaded = beside(worker.load_global)
    while broker.hears_pull().held is None:
        pass
    broker.serves(filled(descent, 500), version(1))
    assert loaded() is True
    assert at(descent) == 500
    beside(descent.steps, 1)()
    broker.serves(filled(descent, 1000), version(2), push.push_id)
    _until(lambda: bool(worker._link and worker._link.has_news))
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
    _until(lambda: worker.should_stop)
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
    monkeypatch.setattr("diloco_worker.link.FAILURE_PAUSE_S", 0.01)
    original = Pushes.granted

    def explode(self: Pushes, *_: object) -> Any:
        monkeypatch.setattr(Pushes, "granted", original)
        raise ZeroDivisionError("nobody expected this")

    monkeypatch.setattr(Pushes, "granted", explode)
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
    monkeypatch.setattr("diloco_worker.link.MAX_FAILURES", 1)
    monkeypatch.setattr(Pushes, "granted", lambda *_: 1 / 0)
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
    _until(lambda: bool(worker._link and worker._link.has_news))
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
