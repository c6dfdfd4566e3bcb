"""An address without tcp:// means the same everywhere; what is none is quoted as it was written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from diloco_broker import Broker, BrokerConfig
from diloco_broker.cli.app import app as broker_app
from diloco_protocol.addresses import control_address, is_loopback, with_scheme
from diloco_protocol.clients import Operator
from diloco_tools.dashboard.source import FeedSource
from diloco_tools.feed.listener import FeedSubscriber
from diloco_tools.top.cli import app as top_app
from diloco_worker import DiLoCoClient, DiLoCoWorker

PATIENCE_S = 20.0


@pytest.fixture
def broker() -> Iterator[Broker]:
    """Bound by addresses without tcp://, with parameters."""
    weights = {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}
    config = BrokerConfig(workers=1, bind="127.0.0.1:*", feed="localhost:0")
    with Broker(config, initial=weights) as made:
        yield made


def bare(address: str) -> str:
    assert address.startswith("tcp://")
    return address.removeprefix("tcp://")


def test_every_part_finds_the_broker_at_host_and_port(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, feed = bare(broker.address), bare(broker.feed_address)
    run = CliRunner().invoke
    with DiLoCoClient(control, timeout=PATIENCE_S) as client:
        assert client.status()["counts"]["alive"] == 0
        assert client.server == broker.address
    model = nn.Linear(2, 1)
    monkeypatch.setenv("DILOCO_SERVER", control)
    with DiLoCoWorker(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        assert model.weight.tolist() == [[1.0, 1.0]]
    with Operator(control, timeout=PATIENCE_S) as operator:
        assert operator.ask("status").ok
    file = tmp_path / "model.safetensors"
    for command in (["status", "--address", control], ["export", control, "--to", str(file)]):
        done = run(broker_app, command)
        assert done.exit_code == 0, done.output
    assert file.exists()
    with FeedSubscriber(feed) as listener:
        assert listener.receive(PATIENCE_S) is not None
    with FeedSource(feed) as source:
        pass
    assert listener.address == source.address == broker.feed_address
    shown = run(top_app, [feed, "--once", "--timeout", f"{PATIENCE_S:g}"])
    assert broker.feed_address in shown.output


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("10.0.0.1:8512", "tcp://10.0.0.1:8512"),
        ("localhost:*", "tcp://localhost:*"),
        ("[::1]:8512", "tcp://[::1]:8512"),
        ("tcp://host:1", "tcp://host:1"),
        ("ipc:///run/broker", "ipc:///run/broker"),
        # What nobody can guess stays as it was written, to be complained about.
        ("host", "host"),
        ("host:port", "host:port"),
        (":8512", ":8512"),
        ("::1:8512", "::1:8512"),
        ("//10.0.0.1:8512", "//10.0.0.1:8512"),
        ("a/b:1", "a/b:1"),
        ("host:\u0661", "host:\u0661"),
        ("", ""),
    ],
)
def test_only_host_and_port_get_the_scheme(written: str, meant: str) -> None:
    assert with_scheme(written) == meant


@pytest.mark.parametrize(
    ("control", "feed", "expected"),
    [
        ("tcp://10.1.1.1:8512", "tcp://10.1.1.1:8513", "tcp://10.1.1.1:8512"),
        ("tcp://0.0.0.0:8512", "tcp://broker:8513", "tcp://broker:8512"),
        ("tcp://*:8512", "tcp://broker:8513", "tcp://broker:8512"),
        ("tcp://[::]:8512", "tcp://[2001:db8::1]:8513", "tcp://[2001:db8::1]:8512"),
        ("tcp://*:8512", "ipc:///run/feed", "tcp://127.0.0.1:8512"),
        ("ipc:///run/control", "tcp://broker:8513", "ipc:///run/control"),
    ],
)
def test_a_broker_that_listens_everywhere_is_asked_where_its_feed_is(
    control: str, feed: str, expected: str
) -> None:
    assert control_address(control, feed) == expected


def test_loopback_is_what_no_other_machine_reaches() -> None:
    here = ("localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]")
    elsewhere = ("0.0.0.0", "*", "", "10.0.0.5", "::", "[::]", "gpu-box", "localhost.evil.example")
    assert [is_loopback(host) for host in here] == [True] * len(here)
    assert [is_loopback(host) for host in elsewhere] == [False] * len(elsewhere)
