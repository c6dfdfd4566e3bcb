"""Feed, history and audit are for those who look on: whatever fails there, the run goes on."""

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from diloco_broker import Broker, BrokerConfig
from diloco_broker.core.operations import status
from diloco_broker.core.operations.status import EventLog
from diloco_broker.shell import loop, onlookers
from diloco_broker.shell.process_memory import rss_bytes
from diloco_broker.storage.audit_log import AuditLog
from diloco_protocol.feed import TOPIC
from diloco_tools.monitor.feed.listener import FeedSubscriber
from kit.process_kit import wait_for
from kit.raw_worker import RawWorker, one_tensor
from kit.whole_run import joined, make_config, mlp

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
        worker.seed(torch.ones(ELEMENTS))
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


def test_failure_for_onlookers_is_repeated_after_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    failures = onlookers.Failures(lambda: now)
    for now in range(0, 150, 10):  # noqa: B007 - the clock reads it
        for what in ("feed", "audit"):
            with failures.caught(what):
                raise ValueError(what)
    said = [r.getMessage().split()[1] for r in caplog.records if r.levelno == logging.ERROR]
    assert said == ["feed", "audit"] * 3


# Subscribers of the feed: the run and the others do not notice the bad ones.

MANY = 20
# What the broker may keep for each of them: its queue, in snapshots, is bounded.
GROWTH_BYTES = 16 << 20


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def sleeper(stack: ExitStack, context: zmq.Context[Any], address: str) -> None:
    """Subscribes, takes one snapshot into its queue, and never reads."""
    listener = stack.enter_context(context.socket(zmq.SUB))
    listener.set(zmq.LINGER, 0)
    listener.set(zmq.RCVHWM, 1)
    listener.set(zmq.RCVBUF, 4096)
    listener.subscribe(TOPIC)
    listener.connect(address)


def stranger(stack: ExitStack, address: str) -> None:
    """Connects, and does not even speak ZMTP."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    stack.enter_context(socket.create_connection((host, int(port)), timeout=5))


def sequence(broker: Broker) -> int:
    """How many snapshots were published."""
    with FeedSubscriber(broker.feed_address) as listener:
        snapshot = listener.receive(10.0)
    assert snapshot is not None
    return snapshot.sequence


@pytest.mark.slow
def test_subscribers_that_never_read_do_not_slow_the_broker(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FEED_EVERY_S", 0.0005)
    with Broker(make_config(workers=1)) as broker, ExitStack() as stack:
        for _ in range(MANY):
            sleeper(stack, context, broker.feed_address)
            stranger(stack, broker.feed_address)
        model = mlp()
        (client,) = stack.enter_context(joined(broker, model, 1))
        wait_for(lambda: sequence(broker) > 1000)
        before, said = rss_bytes(), sequence(broker)
        zeros = {name: value * 0 for name, value in model.state_dict().items()}
        for number in range(20):
            client.push(zeros)
            assert client.pull().version.counter == number + 1
        wait_for(lambda: sequence(broker) > said + 3000)
        assert rss_bytes() - before < GROWTH_BYTES
        with FeedSubscriber(broker.feed_address) as good:
            heard = [good.receive(10.0) for _ in range(3)]
        sequences = [snapshot.sequence for snapshot in heard if snapshot is not None]
        assert len(sequences) == 3
        assert sequences == sorted(set(sequences))
        assert sequences[0] > said
