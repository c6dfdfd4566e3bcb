"""Short forms of an address mean the same everywhere; anything else is quoted as it was written."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from diloco_broker import Broker, BrokerConfig
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.addresses import address_or_path, as_reached, is_loopback, with_scheme
from diloco_protocol.clients import Operator, find_keys
from diloco_protocol.clients.address_file import (
    NoAddress,
    file_of,
    read_address,
    resolved,
    write_address,
)
from diloco_protocol.errors import Refused, UsageError
from diloco_protocol.roles import Peer, Role
from diloco_tools.monitor.feed.listener import FeedSubscriber
from diloco_tools.monitor.web.source import FeedSource
from diloco_worker import DiLoCoClient, DiLoCoWorker

PATIENCE_S = 60.0  # only a failure takes that long; a busy machine needs some tries of 2 s


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


def test_all_parts_take_host_and_port(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    control, feed = bare(broker.address), bare(broker.feed_address)
    with DiLoCoClient(control, timeout=PATIENCE_S) as client:
        assert client.status()["counts"]["alive"] == 0
        assert client.server == broker.address
    model = nn.Linear(2, 1)
    monkeypatch.setenv("DILOCO_SERVER", control)
    with DiLoCoWorker(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        assert model.weight.tolist() == [[1.0, 1.0]]
    with Operator(control, timeout=PATIENCE_S) as operator:
        assert operator.ask("status").ok
    with FeedSubscriber(feed) as listener:
        assert listener.receive(PATIENCE_S) is not None
    with FeedSource(feed) as source:
        pass
    assert listener.address == source.address == broker.feed_address


def test_feed_given_as_the_control_address_is_recognized(broker: Broker) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(Refused, match=broker.address):
        DiLoCoWorker(model, torch.optim.SGD(model.parameters()), server=broker.feed_address).start()
    with (
        pytest.raises(UsageError, match=broker.address),
        Operator(broker.feed_address, timeout=PATIENCE_S) as operator,
    ):
        operator.ask("status")


@pytest.mark.slow
def test_mistaken_address_is_recognized_where_all_traffic_is_encrypted(tmp_path: Path) -> None:
    KeyFolder.make(tmp_path / "keys").add_all([Peer(Role.MONITOR, "wall")])
    keys = find_keys(tmp_path / "keys", Role.MONITOR)
    config = BrokerConfig(keys=str(tmp_path / "keys"), bind="localhost:*", feed="localhost:*")
    with Broker(config) as broker:
        with (
            pytest.raises(UsageError, match=broker.address),
            Operator(broker.feed_address, timeout=PATIENCE_S, keys=keys) as operator,
        ):
            operator.ask("status")
        with FeedSubscriber(broker.address, keys=keys) as listener:
            assert listener.receive(PATIENCE_S) is not None
            assert listener.address == broker.feed_address


def test_address_without_a_port_is_distinguished_from_a_path() -> None:
    addresses = {"localhost": "tcp://localhost:8512", "10.0.0.1": "tcp://10.0.0.1:8512"}
    addresses |= {"gpu:1": "tcp://gpu:1", "tcp://gpu": "tcp://gpu:8512"}
    assert {text: address_or_path(text) for text in addresses} == addresses
    for path in ("diloco-run", "runs/a", "model.safetensors", "."):
        assert address_or_path(path) is None


def test_host_and_port_are_completed_to_an_address() -> None:
    with_a_port = ("10.0.0.1:8512", "localhost:*", "[::1]:8512")
    host_alone = ("localhost", "gpu_box.lab-2", "10.0.0.1", "[::1]", "*")
    whole = ("tcp://host:1", "ipc:///run/broker")
    # Anything else stays as it was written, for the error message to quote.
    odd = ("8512", "a b", "host:", "tcp://", "host:port", ":8512", "::1:8512", "//10.0.0.1:8512")
    meant = {text: f"tcp://{text}" for text in with_a_port}
    meant |= {text: f"tcp://{text}:8512" for text in host_alone}
    meant |= {text: text for text in (*whole, *odd, "a/b:1", "host:\u0661", "")}
    meant["tcp://host"] = "tcp://host:8512"
    assert {text: with_scheme(text) for text in meant} == meant


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
def test_control_address_follows_that_of_the_feed(control: str, feed: str, expected: str) -> None:
    assert as_reached(control, feed) == expected


def test_loopback_hosts_are_recognized() -> None:
    here = ("localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]")
    elsewhere = ("0.0.0.0", "*", "", "10.0.0.5", "::", "[::]", "gpu-box", "localhost.evil.example")
    assert [is_loopback(host) for host in here] == [True] * len(here)
    assert [is_loopback(host) for host in elsewhere] == [False] * len(elsewhere)


def test_address_file_is_written_atomically_and_read_back(tmp_path: Path) -> None:
    file = tmp_path / "address"
    for port in (1, 2):
        write_address(file, f"tcp://10.0.0.1:{port}", f"tcp://[::1]:{port}")
        assert read_address(file) == f"tcp://10.0.0.1:{port}"
        assert resolved(f"file://{file}", line=1) == f"tcp://[::1]:{port}"
    assert list(tmp_path.iterdir()) == [file], "nothing is left beside it"


def test_wildcard_host_is_written_as_the_host_name(tmp_path: Path) -> None:
    file, name = tmp_path / "address", socket.gethostname()
    write_address(file, "tcp://0.0.0.0:8512", "tcp://[::]:8513")
    found = [read_address(file, line) for line in (0, 1)]
    assert found == [f"tcp://{name}:8512", f"tcp://{name}:8513"]
    file.write_text(" gpu-box:8512 \n")  # by a person
    assert read_address(file) == "tcp://gpu-box:8512"


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b" \n", b"\ntcp://h:1", b"\xff\xfe\x00", b"tcp://h:8512\n" + b"x" * 1024),
        *(b"h", b"tcp://h:0", b"tcp://h:65536", b"tcp://:8512", "tcp://h\u00e9:8512".encode()),
        *(b"tcp://*:8512", b"tcp://0.0.0.0:8512", b"tcp://h:8512;tcp://evil:1"),
        *(b"tcp://eth0;h:8512", b"tcp://h h:8512", b"tcp://h\x1b[2J:8512", b"udp://h:8512"),
        *(b"file:///etc/passwd", b"inproc://x", b"ipc://"),
    ],
)
def test_malformed_address_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "address"
    file.write_bytes(content)
    with pytest.raises(NoAddress, match=r"empty|has no address"):
        read_address(file)
    with pytest.raises(UsageError):
        resolved(f"file://{file}")


def test_path_that_is_not_a_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NoAddress, match="is not a file"):
        read_address(tmp_path / "pipe")
    with pytest.raises(NoAddress, match="does not exist yet"):
        read_address(tmp_path / "none")
    with pytest.raises(NoAddress, match=r"directory|not a file"):
        read_address(tmp_path)
    write_address(tmp_path / "one", "tcp://h:1")
    with pytest.raises(NoAddress, match="has no address"):
        read_address(tmp_path / "one", line=1)


@pytest.mark.parametrize(
    "address", ["tcp://h:1", "h:1", "file://", "file://relative", "file:///a\nb", "file:/x"]
)
def test_only_absolute_file_urls_name_a_file(address: str) -> None:
    assert file_of(address) is None
    assert resolved(address) == address


def test_failed_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "address").mkdir()
    (tmp_path / "address" / "x").touch()
    with pytest.raises(OSError, match=r"directory|not empty"):
        write_address(tmp_path / "address", "tcp://h:1")
    assert [path.name for path in tmp_path.iterdir()] == ["address"]
