"""Whole runs with a model that is slow to copy, of which a worker is removed, or beside another run."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Lock

import pytest
import torch

from diloco_broker import Broker
from diloco_protocol.chunks import FragmentLayout
from diloco_worker import DiLoCoClient, DiLoCoWorker
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.model_tensors import ModelTensors
from kit.process_kit import wait_for
from kit.reference import Plan, Trainee, state_of
from kit.whole_run import PATIENCE_S, an_mlp, check, make_config, strided, trainees


def test_copy_of_a_large_model_may_outlast_every_patience_of_the_broker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The offer goes out before the model is copied, and heartbeats go on meanwhile."""
    capture, may_end = ModelTensors.capture, threading.Event()

    def slowly(tensors: ModelTensors, layout: FragmentLayout) -> FlatState:
        assert may_end.wait(20)
        return capture(tensors, layout)

    monkeypatch.setattr(ModelTensors, "capture", slowly)
    caplog.set_level(logging.INFO, "diloco.broker")
    each = an_mlp(0)
    wanted = state_of(each.model)
    broker = Broker(make_config(heartbeat_timeout=1.0))
    broker._loop.core.state.model.patience_s = 0.1
    with broker, ThreadPoolExecutor(1) as pool:
        worker = DiLoCoWorker(each.model, each.optimizer, server=broker.address, worker_id="slow")
        try:
            started = pool.submit(worker.start)
            wait_for(lambda: "slow has sent no parameters for 0.8 s, and no other" in caplog.text)
        finally:
            may_end.set()
        started.result(20)
        worker.close()
    assert "dead" not in caplog.text, caplog.text
    assert all(torch.equal(wanted[name], tensor) for name, tensor in state_of(each.model).items())


def test_two_brokers_and_their_workers_live_in_one_process() -> None:
    lock = Lock()

    def alone(worker: int) -> Trainee:
        with lock:  # models are drawn from the one generator of torch
            return an_mlp(worker)

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(check, Plan(2, strided(1)), alone) for _ in range(2)]:
            each.result(60)


def test_kicked_worker_is_told_and_does_not_come_back_by_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    made = trainees(2)
    with Broker(make_config(mode="async", workers=2, sync_every=2)) as broker, ExitStack() as stack:
        goes, stays = (
            stack.enter_context(
                DiLoCoWorker(each.model, each.optimizer, server=broker.address, worker_id=name)
            )
            for name, each in zip(("goes", "stays"), made, strict=True)
        )
        operator = stack.enter_context(DiLoCoClient(broker.address, timeout=PATIENCE_S))
        assert "goes was removed; 1 worker is left" in operator.control("kick", worker="goes").text
        wait_for(lambda: goes.should_stop)
        for _ in range(8):  # the loop may go on after it, alone
            for each in made:
                each.step()
        assert stays.sync_count == 4
        assert not stays.should_stop
        assert (goes.sync_count, goes.sync_metrics.reconnections) == (0, 0)
    assert sum("goes joins" in text for text in caplog.messages) == 1
