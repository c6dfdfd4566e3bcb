"""Feed, history and audit are for those who look on: whatever fails there, the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_broker import Broker, BrokerConfig
from diloco_broker.core.operations import status
from diloco_broker.core.operations.status import EventLog
from diloco_broker.shell import loop, onlookers
from diloco_broker.storage.audit_log import AuditLog
from kit.raw_worker import RawWorker, one_tensor

ELEMENTS = 5


def a_config(**options: Any) -> BrokerConfig:
    address = "tcp://127.0.0.1:*"
    return BrokerConfig(workers=1, wire_dtype="fp32", bind=address, feed=address, **options)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """A broker of which all there is is written down, with a snapshot each turn."""
    monkeypatch.setattr(loop, "FEED_EVERY_S", 0.0)
    files = {"save_dir": str(tmp_path), "audit": str(tmp_path / "audit.jsonl")}
    config = a_config(outer="sgd", outer_lr=1.0, **files)
    with Broker(config) as broker:
        yield broker


@pytest.mark.parametrize(
    ("where", "name", "what"),
    [
        (status, "snapshot_and_line", "feed"),
        (status, "start_line", "feed"),
        (status, "round_line", "history of the round"),
        (status, "action_line", "log of actions"),
        (EventLog, "add", "history of an event"),
        (AuditLog, "add", "audit"),
    ],
)
def test_rounds_go_on_whatever_fails_for_onlookers_and_it_is_said_once(
    watched: Broker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: Any,
    name: str,
    what: str,
) -> None:
    failures = []

    def fails(*_: object, **__: object) -> Any:
        failures.append(name)
        raise ValueError("NaN is not for JSON")

    with RawWorker(watched.address, "w0") as worker:
        worker.join(one_tensor(ELEMENTS))
        worker.donate(torch.ones(ELEMENTS))
        worker.pull(ELEMENTS)
        monkeypatch.setattr(where, name, fails)
        for number in (1, 2, 3):
            worker.send("control", action="save", request=number)
            worker.receive("result")
            worker.push(number, torch.full((ELEMENTS,), 0.25))
            reached = worker.pull(ELEMENTS, after=number - 1)
        assert reached.tolist() == [1 - 3 * 0.25] * ELEMENTS
    sentence = f"The {what} failed; training continues without it."
    said = [record for record in caplog.records if record.getMessage() == sentence]
    assert len(failures) > 1
    assert len(said) == 1
    watched.stop()


def test_failure_for_onlookers_is_said_again_after_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    failures = onlookers.Failures(lambda: now)
    for now in range(0, 150, 10):  # noqa: B007 - the clock reads it
        for what in ("feed", "audit"):
            with failures.caught(what):
                raise ValueError(what)
    said = [r.getMessage().split()[1] for r in caplog.records if r.levelno == logging.ERROR]
    assert said == ["feed", "audit"] * 3
