"""A worker in health, against a broker that follows a script, over real sockets."""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
import time

import pytest
import torch
from torch import nn

from diloco_protocol import Bitmap, Kind, Refused, Segment, UsageError
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.messages import (
    Error,
    Heartbeat,
    Join,
    Leave,
    Notice,
    Purpose,
    Push,
    Rejoin,
    Welcome,
)
from diloco_worker import DiLoCoWorker
from diloco_worker.model.flat_state import FlatState
from kit.scripted_broker import (
    Beside,
    Descent,
    ScriptedBroker,
    equal,
    run_config,
    scripted_broker,
    version,
)
from kit.uniform_model import Make, at, filled, first

pytest_plugins = ("kit.worker_fixtures",)

H = 4


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
        buffers = descent.values(0, chunk_elements).vectors[Segment.BUFFERS]
        assert push.buffers == "values"
        assert torch.equal(delta.vectors[Segment.BUFFERS], buffers)
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
    kept = other.state_dict()
    assert {key: kept[key] for key in kept if key != "resume"} == {
        key: state[key] for key in state if key != "resume"
    }
    assert (other.local_step, other.sync_count) == (H, 1)
    with pytest.raises(UsageError, match="before"):
        worker.load_state_dict(state)
    with pytest.raises(UsageError, match="not the state"):
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
