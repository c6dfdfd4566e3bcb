"""Whoever listens to the feed, and however badly: the run and the other listeners do not notice."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import zmq

from diloco_broker import Broker
from diloco_broker.shell import loop
from diloco_broker.shell.process_memory import rss_bytes
from diloco_protocol.feed import TOPIC
from diloco_tools.monitor.feed.listener import FeedSubscriber
from kit.uniform_model import until
from kit.whole_run import joined, make_config, mlp

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
        until(lambda: sequence(broker) > 1000)
        before, said = rss_bytes(), sequence(broker)
        zeros = {name: value * 0 for name, value in model.state_dict().items()}
        for number in range(20):
            client.push(zeros)
            assert client.pull().version.counter == number + 1
        until(lambda: sequence(broker) > said + 3000)
        assert rss_bytes() - before < GROWTH_BYTES
        with FeedSubscriber(broker.feed_address) as good:
            heard = [good.receive(10.0) for _ in range(3)]
        sequences = [snapshot.sequence for snapshot in heard if snapshot is not None]
        assert len(sequences) == 3
        assert sequences == sorted(set(sequences))
        assert sequences[0] > said
