"""Feed, history and audit are for those who look on: whatever fails there, the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_broker import Broker, BrokerConfig
from diloco_broker.core import feed
from diloco_broker.core.feed import EventLog
from diloco_broker.shell import loop, onlookers
from diloco_broker.storage import history
from diloco_broker.storage.audit_log import AuditLog
from diloco_broker.storage.history import HISTORY, HistoryWriter
from kit.raw_worker import RawWorker, one_tensor
from kit.uniform_model import until

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


def test_absurd_speeds_in_heartbeats_leave_a_broker_with_dynamic_local_updates_alive() -> None:
    config = a_config(mode="async", dylu=True, sync_every=100)
    with Broker(config) as broker, RawWorker(broker.address, "w0") as worker:
        worker.join(one_tensor(ELEMENTS))
        worker.donate(torch.ones(ELEMENTS))
        for speed in (1e-310, 1.0, 5e-324, 1e308, float("inf"), float("nan"), 2**64 - 1, -1.0, 1.0):
            worker.send("heartbeat", session=worker.session, step=1, steps_per_s=speed)
            while worker.receive("notice")["what"] != "alive":
                pass
        worker.send("control", action="status", request=1)
        (shown,) = worker.receive("result")["data"]["workers"]
        assert (shown["steps_per_s"], shown["sync_every"]) == (1.0, 100)


@pytest.mark.parametrize(
    ("where", "name", "what"),
    [
        (feed, "snapshot_and_line", "feed"),
        (feed, "start_line", "feed"),
        (feed, "round_line", "history of the round"),
        (feed, "action_line", "log of actions"),
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
    sentence = f"The {what} failed; training goes on without it."
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


def test_history_outlives_a_line_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = history._text

    def stumbles(lines: list[dict[str, Any]]) -> str:
        if any(line.get("text") == "odd" for line in lines):
            raise TypeError("no such thing in JSON")
        return write(lines)

    monkeypatch.setattr(history, "_text", stumbles)
    writer = HistoryWriter(tmp_path, "abc")
    writer.add({"kind": "event", "text": "odd"})
    until(lambda: writer.lost == 1)
    assert writer.error == "no such thing in JSON"
    writer.add({"kind": "event", "text": "even"})
    writer.close()
    assert '"even"' in (tmp_path / HISTORY).read_text()
