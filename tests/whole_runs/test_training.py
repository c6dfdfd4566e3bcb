"""Whole runs whose workers differ, or one of which is kicked."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from diloco_broker import Broker
from diloco_worker import DiLoCoClient
from kit.process_kit import wait_for
from kit.raw_worker import DTYPES
from kit.reference import Plan, State, Trainee, streaming
from kit.whole_run import (
    PATIENCE_S,
    an_mlp,
    assert_same,
    hooked,
    make_config,
    run,
    strided,
    trainees,
)


def test_workers_of_a_round_may_differ_in_h_and_wire_dtype() -> None:
    """A worker's "step" here is its whole round."""
    h, wires = [4, 2, 3], ["fp32", "bf16", "fp16"]

    def rounds(worker: int) -> Trainee:
        each = an_mlp(worker)

        def steps() -> None:
            for _ in range(h[worker]):
                each.step()

        return Trainee(each.model, each.optimizer, steps)

    own = [{"sync_every": n, "wire_dtype": wire} for n, wire in zip(h, wires, strict=True)]
    workers = range(len(h))
    with Broker(make_config(workers=len(h), sync_every=9, deterministic=True)) as broker:
        got = run(broker, [rounds(worker) for worker in workers], 4, own=own)

    def travels(worker: int, delta: State) -> State:
        return {name: value.to(DTYPES[wires[worker]]).float() for name, value in delta.items()}

    made = [rounds(worker) for worker in workers]
    wanted = streaming(made, 4, Plan(1, strided(1)), travels=travels)
    assert_same(got, wanted, exact=True)
    for name, tensor in got.final.items():
        assert all(torch.equal(history[-1][name], tensor) for history in got.histories)


def test_kicked_worker_stops_and_does_not_reconnect(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    made = trainees(2)
    config = make_config(workers=2, sync_every=4, num_fragments=2)
    with (
        Broker(config) as broker,
        DiLoCoClient(broker.address, timeout=PATIENCE_S) as operator,
        hooked(broker, made) as (goes, stays),
    ):
        with ThreadPoolExecutor(2) as pool:
            for together in [pool.submit(make_steps, each, 12) for each in made]:
                together.result(PATIENCE_S)
        sent = 3 * config.num_fragments
        assert min(goes.sync_count, stays.sync_count) >= sent - 1  # the last may be under way
        assert "w0 was removed" in operator.control("kick", worker="w0").text
        wait_for(lambda: goes.should_stop)
        for each in made:  # the loop of the one that went may go on, alone
            make_steps(each, 24)
        assert stays.sync_count >= 3 * sent - 1
        assert not stays.should_stop
        assert goes.sync_count <= sent
        assert goes.sync_metrics.reconnections == 0
    assert sum("w0 joins" in text for text in caplog.messages) == 1


def make_steps(each: Trainee, number: int) -> None:
    for _ in range(number):
        each.step()
