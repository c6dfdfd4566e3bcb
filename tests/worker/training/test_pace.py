"""What a worker counts and reports, and how often it synchronises; asynchronous mode."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from diloco_protocol import Refused, UsageError
from diloco_protocol.messages import Chunk, Heartbeat, Join, Notice, Push, Welcome
from diloco_worker import DiLoCoWorker
from diloco_worker.training.reports import Pace
from kit.scripted_broker import Beside, Descent, ScriptedBroker, run_config, version
from kit.uniform_model import Make, at, filled, first, until

pytest_plugins = ("kit.worker_fixtures",)


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))


def sync(
    broker: ScriptedBroker, beside: Beside, descent: Descent, steps: int, counter: int
) -> Push:
    """So many steps to the next boundary of a run without fragments, and its round."""
    training = beside(descent.steps, steps)
    push, _ = broker.takes_push()
    broker.serves(filled(descent, 100), version(counter), push.push_id)
    training()
    return push


# What a step is.


def test_accumulated_gradients_count_as_one_step(broker: ScriptedBroker, begin: Make) -> None:
    broker.config = run_config(sync_every=2, fragment_sync_delay=1)
    worker, descent = begin()
    for micro_batch in range(8):
        descent.model(torch.ones(1, 3)).sum().backward()
        if micro_batch % 4 == 3:
            descent.optimizer.step()
            descent.optimizer.zero_grad()
    assert worker.local_step == 2
    assert broker.hears(Push).steps == 2


@pytest.mark.parametrize("is_fused", [False, True], ids=["skipped", "skipped inside a fused step"])
def test_step_that_an_amp_scaler_skips_does_not_count(
    broker: ScriptedBroker, begin: Make, is_fused: bool
) -> None:
    broker.config = run_config(sync_every=2, fragment_sync_delay=1)
    worker, descent = begin()
    if is_fused:  # as SGD(..., fused=True) does; the scaler then calls step() always
        descent.optimizer.param_groups[0]["fused"] = True
        descent.optimizer._step_supports_amp_scaling = True
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for overflows in (False, True, True, False):
        descent.optimizer.zero_grad()
        loss = descent.model(torch.ones(1, 3)).sum() * (float("inf") if overflows else 1.0)
        scaler.scale(loss).backward()
        scaler.step(descent.optimizer)
        scaler.update()
    assert worker.local_step == 2
    assert broker.hears(Push).steps == 2


def test_step_that_is_captured_in_a_cuda_graph_is_no_step_and_is_complained_of_once(
    beside: Beside,
    broker: ScriptedBroker,
    begin: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While kernels are recorded none runs; what replays them later calls no hook."""
    worker, descent = begin()
    sync(broker, beside, descent, 4, 1)
    with monkeypatch.context() as cuda:
        cuda.setattr(torch.cuda, "is_initialized", lambda: True)
        cuda.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        descent.steps(2)
    said = [record for record in caplog.records if "CUDA graph" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.ERROR]
    assert worker.local_step == 4
    assert "call optimizer.step() behind each replay" in str(worker.sync_metrics.last_error)
    descent.steps(1)
    assert worker.local_step == 5


def test_pace_leaves_out_what_was_no_training() -> None:
    pace = Pace()
    pace.resume(0.0)
    pace.step(2.0)
    assert pace.steps_per_s == 0.5
    pace.resume(100.0)  # a boundary waited for its round
    pace.leave_out(50.0)  # the script asked for something between two steps
    pace.step(152.0)
    assert pace.steps_per_s == 0.5


def test_waiting_in_force_sync_is_not_counted_as_a_slow_step(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()
    now = [0.0]
    link, pace = worker._link, worker._pace
    assert link is not None
    descent.steps(1)
    pace._seconds, pace._left_at = 1.0, 0.0
    worker._clock = lambda: now[0]
    forced = beside(worker.force_sync)
    push, _ = broker.takes_push()
    now[0] = 1000.0
    broker.serves(filled(descent, 5), version(1), push.push_id)
    assert forced() is True
    now[0] = 1001.0
    descent.steps(1)
    assert pace.steps_per_s == 1.0


# Reports.


def test_counts_of_a_push_are_those_since_its_fragment_was_frozen_last(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    broker.config = run_config(sync_every=6, num_fragments=3)
    worker, descent = begin(layers())
    counts = []
    for round_ in range(5):

        def train() -> None:
            for _ in range(2):
                worker.report(tokens=10, samples=torch.tensor(3))
                descent.steps(1)

        training = beside(train)
        push, _ = broker.takes_push(round_)
        counts.append((push.fragment, push.steps, push.tokens, push.samples))
        new = filled(descent, 100, broker, push.fragment)
        broker.serves(new, version(round_ // 3 + 1), push.push_id)
        training()
    assert counts == [(0, 2, 20, 6), (1, 4, 40, 12), (2, 6, 60, 18), (0, 6, 60, 18), (1, 6, 60, 18)]
    assert worker.state_dict()["samples"] == 30


def test_steps_that_load_global_drops_are_not_in_the_counts_of_the_next_push(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    worker, descent = begin()

    def train(steps: int) -> None:
        for _ in range(steps):
            worker.report(tokens=10, samples=3)
            descent.steps(1)

    train(3)
    loaded = beside(worker.load_global)
    broker.hears_pull()
    broker.serves(filled(descent, 50), version(1))
    assert loaded() is True
    training = beside(train, 4)
    push, _ = broker.takes_push()
    assert (push.steps, push.tokens, push.samples) == (4, 40, 12)
    broker.serves(filled(descent, 7), version(2), push.push_id)
    training()


def test_samples_of_many_values_are_refused(begin: Make) -> None:
    worker, _ = begin()
    with pytest.raises(UsageError, match=r"samples.*\[2\]"):
        worker.report(samples=torch.zeros(2))


@pytest.mark.parametrize(("weight_by", "other"), [("tokens", "samples"), ("samples", "tokens")])
def test_run_that_weighs_by_what_nobody_reports_is_warned_of_once(
    broker: ScriptedBroker,
    beside: Beside,
    begin: Make,
    caplog: pytest.LogCaptureFixture,
    weight_by: str,
    other: str,
) -> None:
    broker.config = run_config(weight_by=weight_by)
    worker, descent = begin()
    for counter in (1, 2):
        worker.report(**{other: 5})
        sync(broker, beside, descent, 4, counter)
    assert caplog.text.count(f"call report({weight_by}=...)") == 1


def test_run_that_weighs_by_what_is_reported_is_content(
    broker: ScriptedBroker, beside: Beside, begin: Make, caplog: pytest.LogCaptureFixture
) -> None:
    broker.config = run_config(weight_by="tokens")
    worker, descent = begin()
    worker.report(tokens=5)
    assert sync(broker, beside, descent, 4, 1).tokens == 5
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_every_boundary_sends_a_heartbeat_first_and_one_when_training_goes_on(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    _, descent = begin()
    for boundary in (1, 2):
        training = beside(descent.steps, 4)
        beat = broker.hears(Heartbeat)
        assert beat.step == 4 * boundary
        assert beat.steps_per_s is not None
        push, _ = broker.takes_push()
        broker.serves(filled(descent, 100), version(boundary), push.push_id)
        training()
        beat = broker.hears(Heartbeat)
        assert (beat.step, beat.inner_step) == (4 * boundary, 0)


# Dynamic Local Updates.


def paced(broker: ScriptedBroker, worker: DiLoCoWorker, sync_every: int) -> None:
    broker.says(Notice("alive", sync_every=sync_every))
    until(lambda: bool(worker._link and worker._link.sync_every == sync_every))


def test_h_of_its_own_is_used_from_the_next_cycle_on(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    broker.config = run_config(dylu=True)
    worker, descent = begin()
    assert worker.sync_every == 4
    descent.steps(1)
    paced(broker, worker, 2)
    descent.steps(1)
    assert worker.sync_every == 4, "the cycle at hand goes on as it began"
    assert sync(broker, beside, descent, 2, 1).steps == 4
    assert worker.sync_every == 2
    assert sync(broker, beside, descent, 2, 2).steps == 2


def test_h_that_answers_the_heartbeat_of_a_boundary_holds_for_the_next_round(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    broker.config = run_config(dylu=True)
    worker, descent = begin()
    training = beside(descent.steps, 4)
    broker.hears(Heartbeat)
    paced(broker, worker, 3)
    push, _ = broker.takes_push()
    broker.serves(filled(descent, 100), version(1), push.push_id)
    training()
    assert worker.sync_every == 3
    assert sync(broker, beside, descent, 3, 2).steps == 3


@pytest.mark.parametrize(
    ("config", "keywords"),
    [
        ({"dylu": False}, {}),
        ({"dylu": True}, {"dylu": False}),
        ({"dylu": True}, {"sync_every": 4}),
    ],
)
def test_h_of_its_own_is_not_for_everyone(
    broker: ScriptedBroker,
    beside: Beside,
    begin: Make,
    config: dict[str, Any],
    keywords: dict[str, Any],
) -> None:
    broker.config = run_config(**config)
    worker, descent = begin(**keywords)
    paced(broker, worker, 2)
    assert sync(broker, beside, descent, 4, 1).steps == 4
    assert worker.sync_every == 4


# An H of its own, and asynchronous mode.


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_worker_uses_its_own_h_and_wire_dtype(
    broker: ScriptedBroker, beside: Beside, begin: Make, mode: str
) -> None:
    broker.config = run_config(mode=mode)
    worker, descent = begin(sync_every=3, wire_dtype="bf16")
    assert (worker.sync_every, worker.config) == (3, broker.config)
    push = sync(broker, beside, descent, 3, 1)
    assert (push.steps, push.wire_dtype) == (3, "bf16")


def test_own_h_gives_way_to_a_smaller_one_of_a_run_with_rounds(
    broker: ScriptedBroker, beside: Beside, begin: Make, caplog: pytest.LogCaptureFixture
) -> None:
    broker.config = run_config(sync_every=2)
    worker, descent = begin(sync_every=3)  # the broker knows it: it does not refuse it
    assert worker.sync_every == 2
    assert "asks for sync_every=3, the run has 2 now; 2 is used" in caplog.text
    assert sync(broker, beside, descent, 2, 1).steps == 2


def test_own_h_below_the_number_of_fragments_is_refused(
    broker: ScriptedBroker, beside: Beside, make: Make
) -> None:
    broker.config = run_config(mode="async", sync_every=6, num_fragments=3)
    worker, _ = make(layers(), sync_every=2)
    started = beside(worker.start)
    broker.control, _, _ = broker.hears_from(Join)
    broker.says(Welcome(b"s" * 16, "epoch", broker.config, 0))
    with pytest.raises(Refused, match="sync_every is 2 and the run has 3 fragments"):
        started()


def test_push_without_a_slot_waits_for_one(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    broker.config = run_config(mode="async", sync_every=6, num_fragments=3)
    _, descent = begin(layers())
    training = beside(descent.steps, 2)
    push = broker.hears(Push)
    broker.puts_off(push)
    broker.hears_nothing_of(Chunk, 0.05)
    assert beside.is_busy, "its own flight can always be waited for"
    broker.grants(push, credit=8)
    broker.takes_chunks(push, push.chunks)
    broker.serves(filled(descent, 7, broker), version(1), push.push_id, staleness=5)
    training()
    assert at(descent, broker) == 7


def test_push_that_loses_its_slot_is_sent_again_whole(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    broker.config = run_config(mode="async")
    worker, descent = begin()
    training = beside(descent.steps, 4)
    push = broker.hears(Push)
    broker.grants(push, credit=2)
    broker.takes_chunks(push, 1)
    broker.puts_off(push)
    hears_of_it(worker, "wait")
    broker.grants(push, credit=2)
    hears_of_it(worker, "new")
    chunks = broker.takes_chunks(push, push.chunks)
    assert first(broker.decoded(push, chunks)) == 4
    broker.serves(filled(descent, 7), version(1), push.push_id)
    training()
    assert worker.sync_metrics.rounds == 1


def hears_of_it(worker: DiLoCoWorker, standing: str) -> None:
    """Wait until the link has taken up the last grant."""
    link = worker._link
    assert link is not None

    def is_so() -> bool:
        return [each.standing for each in link._io.session.uploads] == [standing]

    until(is_so)


def test_staleness_is_what_the_broker_says(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    broker.config = run_config(mode="async")
    worker, descent = begin()
    training = beside(descent.steps, 4)
    push, _ = broker.takes_push()
    broker.serves(filled(descent, 7), version(9), push.push_id, staleness=2)
    training()
    assert worker.sync_metrics.staleness == 2
    training = beside(descent.steps, 4)
    push, _ = broker.takes_push()
    broker.serves(filled(descent, 7), version(13), push.push_id)
    training()
    assert worker.sync_metrics.staleness == 3, "worked out where it is not told"


def test_order_of_the_fragments_outlasts_a_broken_connection(
    broker: ScriptedBroker, beside: Beside, begin: Make
) -> None:
    broker.config = run_config(mode="async", sync_every=6, num_fragments=3)
    worker, descent = begin(layers())
    training = beside(descent.steps, 2)
    push, _ = broker.takes_push()
    broker.serves(filled(descent, 7, broker), version(1), push.push_id)
    training()
    broker.restart()
    broker.welcomes(version(1), version(0), version(0), first_round=0)
    until(lambda: worker.sync_metrics.reconnections == 1)
    training = beside(descent.steps, 2)
    push, _ = broker.takes_push()
    assert push.fragment == 1
    broker.serves(filled(descent, 7, broker, 1), version(1), push.push_id)
    training()
