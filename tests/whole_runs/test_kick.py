"""An operator removes a worker: it is told, trains alone, and does not come back by itself."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from diloco_broker import Broker
from diloco_worker import DiLoCoClient, DiLoCoWorker
from kit.whole_run import an_mlp, make_config


def test_kicked_worker_stops_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(workers=2, sync_every=4, num_fragments=2)
    is_alone = threading.Event()
    caplog.set_level(logging.INFO)

    def train(name: str, broker: Broker) -> tuple[int, bool, int]:
        each = an_mlp(0)
        stays = name == "stays"
        steps = 0
        with DiLoCoWorker(
            each.model, each.optimizer, server=broker.address, worker_id=name
        ) as diloco:
            while not diloco.should_stop and steps < 100_000:
                each.step()
                steps += 1
                if stays and is_alone.is_set() and diloco.sync_count >= goal[0]:
                    break
                if stays and diloco.sync_count >= 4 and not is_alone.is_set():
                    with DiLoCoClient(broker.address, timeout=20) as operator:
                        result = operator.control("kick", worker="goes")
                        assert "goes was removed; 1 worker is left" in result.text
                    goal[0] = diloco.sync_count + 6
                    is_alone.set()
            ended = diloco.should_stop
            for _ in range(8):  # the loop may go on after it, alone
                each.step()
            return steps, ended, diloco.sync_metrics.reconnections

    goal = [0]
    with Broker(config) as broker, ThreadPoolExecutor(2) as pool:
        runs = {name: pool.submit(train, name, broker) for name in ("stays", "goes")}
        _, stays_ended, _ = runs["stays"].result(60)
        steps, goes_ended, reconnections = runs["goes"].result(60)
    assert goes_ended, "should_stop tells the script"
    assert not stays_ended
    assert steps < 100_000
    assert reconnections == 0, "it does not come back by itself"
    assert sum("goes joins" in text for text in caplog.messages) == 1
