"""Workers on the broker's machine send chunks through a Unix socket, over TCP where they cannot."""

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import zmq

from diloco_broker import Broker
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.clients.same_host import can_be_entered, leads_to
from diloco_worker import DiLoCoClient, DiLoCoWorker
from diloco_worker.transport import broker_connection
from diloco_worker.transport import connections as connections_module
from diloco_worker.transport.forks import monitored
from kit.keyed_broker import file_of
from kit.layers import Layers, delta, name_of
from kit.process_kit import PATIENCE_S, wait_for
from kit.whole_run import make_config

pytest_plugins = ("kit.key_fixtures",)

CHUNK = 16


def socket_of(hook: DiLoCoWorker | DiLoCoClient) -> str:
    """The Unix socket that its chunks go through."""
    link = hook._link
    assert link is not None
    return str(link.shortcut)


def received_over_tcp(broker: Broker) -> int:
    """Bytes, by the system's own count, of the connections that there are."""
    watch = broker._loop.sockets._watch
    figures = [each.transport.figures() for each in watch._by_number.values() if each.transport]
    return sum(each.taken for each in figures if each is not None)


def a_config(**options: Any) -> Any:
    return make_config(**{"sync_every": 3, "chunk_elements": CHUNK, "workers": 2} | options)


def test_chunks_go_through_the_socket_and_only_small_messages_over_tcp() -> None:
    model = torch.nn.Linear(500, 400, bias=False)  # 800 kB
    sent: dict[bool, int] = {}
    for ipc in (True, False):
        with (
            Broker(a_config(workers=1, wire_dtype="fp32", ipc=ipc, chunk_elements=4096)) as broker,
            DiLoCoClient(broker.address, timeout=PATIENCE_S) as client,
        ):
            client.join(model)
            client.push({"weight": torch.ones(400, 500)}, steps=1)
            client.pull()
            assert bool(socket_of(client)) == ipc
            sent[ipc] = received_over_tcp(broker)
    assert sent[False] > 2 * 800_000, "the model and a push"
    assert sent[True] < 20_000


ENTER_AS_ANOTHER_USER = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as probe:
    probe.settimeout(20)
    probe.connect("\\0" + sys.argv[1].removeprefix("ipc://@"))
    print(len(probe.recv(64)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_socket_is_open_to_the_user_of_the_broker_alone() -> None:
    with Broker(a_config()) as broker:
        address = broker._loop.sockets.own_address
        assert address is not None and can_be_entered(address)
        command = [sys.executable, "-c", ENTER_AS_ANOTHER_USER, address]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        assert said.stdout.strip() == "0", "no greeting"
    assert not can_be_entered(address)


def test_socket_that_breaks_alone_twice_is_left_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors: dict[object, int] = {}  # by monitor

    def watched(monitor: Any) -> Iterator[dict[str, Any]]:
        for event in monitored(monitor):
            if event["event"] == zmq.EVENT_CONNECTED:
                descriptors[monitor] = event["value"]
            yield event

    monkeypatch.setattr(connections_module, "monitored", watched)
    with (
        Broker(a_config(workers=1)) as broker,
        DiLoCoClient(broker.address, timeout=PATIENCE_S) as client,
    ):
        client.join(Layers(1))
        client.push({name_of(0): delta(0, 0)}, steps=1)
        client.pull()
        link = client._link
        assert link is not None and socket_of(client)
        for number, (broken, is_near) in enumerate(
            [("bulk", True), ("bulk", False), ("bulk", True), ("control", True)], start=1
        ):
            connections = link._connections
            assert connections is not None
            _shut(descriptors[connections._by_name[broken].monitor])
            wait_for(partial(_has_reconnected, link, number))
            client.push({name_of(0): delta(0, number)}, steps=1)
            client.pull()
            assert bool(socket_of(client)) == is_near
        assert client.status()["round"]["number"] == 5, "nothing is counted twice, nothing is lost"


def _has_reconnected(link: Any, times: int) -> bool:
    return bool(link.session.connection.reconnections == times)


def _shut(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as found:
        found.shutdown(socket.SHUT_RDWR)


def test_socket_asks_for_keys_too(keyed: Broker, folder: KeyFolder) -> None:
    with DiLoCoClient(keyed.address, keys=file_of(folder, "w0"), timeout=PATIENCE_S) as client:
        client.join(Layers(1))
        path = socket_of(client)
        assert path
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            stranger = context.socket(zmq.DEALER)
            monitor = stranger.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED
                | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                | zmq.EVENT_DISCONNECTED
            )
            stranger.connect(path)
            assert monitor.poll(int(PATIENCE_S * 1000))
            event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
            assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
        finally:
            context.destroy(linger=0)


def test_worker_connects_only_to_sockets_of_brokers_that_answer() -> None:
    name = f"test-{secrets.token_hex(8)}"
    assert not can_be_entered(f"ipc://@diloco-{name}"), "it has no listener"
    for prefix, can in (("diloco-", True), ("other-", False)):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{prefix}{name}")
            listener.listen()
            assert can_be_entered(f"ipc://@{prefix}{name}") == can
    for each in (
        "tcp://127.0.0.1:1",
        "",
        "ipc://",
        "ipc:///diloco-x",
        "ipc://@diloco-" + "x" * 500,
    ):
        assert not can_be_entered(each)


@pytest.mark.parametrize(
    ("dialled", "bound", "leads"),
    [
        ("tcp://127.0.0.1:8512", "tcp://127.0.0.1:8512", True),
        ("tcp://localhost:8512", "tcp://127.0.0.1:8512", True),
        ("tcp://127.0.0.1:8512", "tcp://0.0.0.0:8512", True),
        ("tcp://127.0.0.2:8512", "tcp://0.0.0.0:8512", True),
        ("tcp://127.0.0.1:8513", "tcp://127.0.0.1:8512", False),
        ("tcp://127.0.0.2:8512", "tcp://127.0.0.1:8512", False),
        ("tcp://192.0.2.1:8512", "tcp://0.0.0.0:8512", False),
        ("tcp://[::1]:1", "tcp://[::1]:1", True),
        ("ipc:///a:1", "tcp://127.0.0.1:1", False),
        ("tcp://127.0.0.1", "tcp://127.0.0.1", False),
        ("tcp://127.0.0.1:1", "", False),
    ],
)
def test_proxies_have_other_addresses_than_the_broker(
    dialled: str, bound: str, leads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "localhost" in dialled:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 8512))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert leads_to(dialled, bound) == leads


def test_socket_that_vanishes_costs_one_reconnection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ZeroMQ alone would retry it endlessly."""
    looks = iter([True])
    monkeypatch.setattr(broker_connection, "can_be_entered", lambda address: next(looks, False))
    broker = Broker(a_config(workers=1))
    sockets = broker._loop.sockets
    assert sockets.own_address is not None
    sockets._router.unbind(sockets.own_address)
    with broker, DiLoCoClient(broker.address, timeout=PATIENCE_S) as client:
        client.join(Layers(1))
        client.push({name_of(0): delta(0, 0)}, steps=1)
        client.pull()
        assert not socket_of(client)
        assert client._link is not None
        assert _has_reconnected(client._link, 1)
