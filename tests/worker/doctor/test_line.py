"""The rate that the doctor measures is about that of the line, and a round takes about what it says."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from diloco_broker import Broker, BrokerConfig
from diloco_lab.bench.link import SlowProxy
from diloco_worker import DiLoCoClient
from diloco_worker.doctor import line, report
from diloco_worker.doctor.examination import examine
from kit.process_kit import PATIENCE_S

BIND: dict[str, Any] = {"bind": "tcp://127.0.0.1:*", "feed": "tcp://127.0.0.1:*", "workers": 1}
RATE, DELAY_S = 4e6, 0.02  # bytes a second, seconds each way
FACTOR = 1.5
TRIES = 4


def test_rates_are_those_of_the_line_and_a_round_takes_what_is_said() -> None:
    """A busy machine uses less of its line: rates are held against what the line carried then, and
    the time of a round against one of several, since machines are not equally busy all the time."""
    model = torch.nn.Linear(1000, 1000, bias=False)  # a million: two chunks, 2 MB up and 4 MB down
    with (
        Broker(BrokerConfig(**BIND)) as broker,
        SlowProxy(broker.address, RATE, DELAY_S) as slow,
        DiLoCoClient(slow.address) as client,
    ):
        start = client.join(model)
        delta = {name: torch.ones_like(each) for name, each in start.tensors.items()}
        factors = []
        for _ in range(TRIES):
            began = time.monotonic()
            client.push(delta)
            client.pull()
            took = time.monotonic() - began
            slow.forget()
            findings = examine(slow.address, None, PATIENCE_S)
            assert not findings.wrong and findings.trips and findings.up and findings.down
            assert findings.trips.median >= 2 * DELAY_S
            for each, carried in ((findings.up, slow.up), (findings.down, slow.down)):
                assert RATE * carried.share / FACTOR < each.bytes_per_s < RATE * FACTOR
                assert not each.is_at_least
            found = report.estimate(findings, parameters=None, step_time=None)
            assert found is not None and found.exchange.parameters == 1_000_000
            factors.append(max(took / found.seconds, found.seconds / took))
            if factors[-1] < 2 and findings.trips.median < 2 * DELAY_S * FACTOR:
                return
    raise AssertionError(factors)


def test_one_long_pause_does_not_change_the_rate() -> None:
    steady = [0.01 * number for number in range(101)]
    paused = [each + (6.0 if number > 60 else 0.0) for number, each in enumerate(steady)]
    assert line.answers_a_second(steady) == pytest.approx(100.0)
    assert line.answers_a_second(paused) == pytest.approx(100.0)


def test_few_answers_of_a_slow_line_are_enough() -> None:
    assert line.answers_a_second([0.0, 2.0]) == pytest.approx(0.5)
    assert line.answers_a_second([0.0, 2.0, 4.0, 6.0]) == pytest.approx(0.5)
