"""Workers on the broker's machine send chunks through a socket file, over TCP where they cannot."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from diloco_broker import Broker
from diloco_broker.shell.same_host import SocketFolder
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.clients.same_host import can_be_entered, leads_to
from diloco_worker import DiLoCoClient, DiLoCoWorker
from diloco_worker.shell import link as link_module
from kit.keyed_broker import file_of
from kit.layers import Layers, delta, name_of
from kit.process_kit import PATIENCE_S, Processes, a_free_address, wait_for
from kit.whole_run import make_config, run, trainees

pytest_plugins = ("kit.key_fixtures", "kit.process_fixtures")

CHUNK = 16


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # pytest's own folders are too deep for the path of a socket.
    multiprocessing.util.get_temp_dir()  # it keeps its own for as long as the process lives
    folder = Path(tempfile.mkdtemp(prefix="t"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


def way_of(hook: DiLoCoWorker | DiLoCoClient) -> str:
    """The socket file that its chunks go through."""
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


def test_chunks_go_through_the_file_and_nothing_but_words_over_tcp() -> None:
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
            assert bool(way_of(client)) == ipc
            sent[ipc] = received_over_tcp(broker)
    assert sent[False] > 2 * 800_000, "the model and a push"
    assert sent[True] < 20_000


def test_runs_are_the_same_either_way() -> None:
    ends = []
    for ipc in (True, False):
        ways: set[str] = set()

        def note(hook: DiLoCoWorker, *_: int, ways: set[str] = ways) -> None:
            ways.add(way_of(hook))

        with Broker(a_config(ipc=ipc, deterministic=True, num_fragments=2)) as broker:
            outcome = run(broker, trainees(2), 12, after=note)
        assert len(ways) == 1 and bool(ways.pop()) == ipc
        ends.append(outcome.final)
    for name, value in ends[0].items():
        assert torch.equal(ends[1][name], value)


def test_folder_is_of_this_user_alone_and_goes_with_the_broker(own_temporary_folder: Path) -> None:
    with Broker(a_config()) as broker:
        (folder,) = own_temporary_folder.glob("diloco-*")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert broker._loop.sockets.own_address == f"ipc://{folder}/s"
    assert not folder.exists()


def test_path_that_is_too_long_leaves_tcp(
    own_temporary_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    deep = own_temporary_folder / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with Broker(a_config(workers=1)) as broker:
        assert not list(deep.iterdir())
        run(broker, trainees(1), 3, after=lambda hook, *_: _has(way_of(hook), ""))
    assert "come over TCP, too" in caplog.text


def _has(found: str, wanted: str) -> None:
    assert found == wanted


def test_socket_file_that_breaks_alone_twice_is_left_out_once() -> None:
    with (
        Broker(a_config(workers=1)) as broker,
        DiLoCoClient(broker.address, timeout=PATIENCE_S) as client,
    ):
        client.join(Layers(1))
        client.push({name_of(0): delta(0, 0)}, steps=1)
        client.pull()
        link = client._link
        assert link is not None and way_of(client)
        for number, (broken, is_near) in enumerate(
            [("bulk", True), ("bulk", False), ("bulk", True), ("control", True)], start=1
        ):
            connections = link._connections
            assert connections is not None
            _shut(connections.descriptors[broken][0])
            wait_for(partial(_has_reconnected, link, number))
            client.push({name_of(0): delta(0, number)}, steps=1)
            client.pull()
            assert bool(way_of(client)) == is_near
        assert client.status()["round"]["number"] == 5, "nothing is counted twice, nothing is lost"


def _has_reconnected(link: Any, times: int) -> bool:
    return bool(link.session.connection.reconnections == times)


def _shut(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as found:
        found.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_broker_that_was_killed_leaves_nothing_behind_the_next_one(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "sync_every": 3,
        "workers": 1,
        "bind": a_free_address(),
        "save_dir": str(tmp_path / "run"),
        "chunk_elements": CHUNK,
    }
    broker = processes.broker(**options)
    worker = processes.train("w0", broker.address(), 200, 0.01)
    broker.says("Round 3 closed")
    old = folder_of(broker.pid)
    # The processes may have another folder of temporary files than this one.
    monkeypatch.setattr(tempfile, "tempdir", str(old.parent))
    other = SocketFolder()  # of a broker that lives
    broker.kill()
    assert old.exists()
    broker = processes.broker(**options)
    broker.says("Round 6 closed")
    assert not old.exists()
    assert folder_of(broker.pid).parent == old.parent
    assert os.path.exists(os.path.dirname(other.path))
    worker.kill()
    broker.gets(signal.SIGTERM)
    broker.ends()
    other.close()


def folder_of(broker: int) -> Path:
    """The private folder of a process, by the lock that it holds."""
    held = set()
    for each in Path(f"/proc/{broker}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            held.add(os.readlink(each))
    (lock,) = [each for each in held if "/diloco-" in each and each.endswith("/lock")]
    return Path(lock).parent


def test_keys_are_asked_for_there_as_well(keyed: Broker, folder: KeyFolder) -> None:
    with DiLoCoClient(keyed.address, keys=file_of(folder, "w0"), timeout=PATIENCE_S) as client:
        client.join(Layers(1))
        path = way_of(client)
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


def test_worker_enters_only_what_is_private_and_answers(own_temporary_folder: Path) -> None:
    made = SocketFolder()
    assert not can_be_entered(made.address), "nobody listens"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(made.path)
        listener.listen()
        assert can_be_entered(made.address)
        os.chmod(os.path.dirname(made.path), 0o750)
        assert not can_be_entered(made.address)
        os.chmod(os.path.dirname(made.path), 0o700)
        link = own_temporary_folder / "diloco-link"
        link.symlink_to(os.path.dirname(made.path))
        assert not can_be_entered(f"ipc://{link}/s")
    other = own_temporary_folder / "other"
    other.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(other / "s"))
        listener.listen()
        assert not can_be_entered(f"ipc://{other}/s"), "a socket of some other program"
    for each in ("tcp://127.0.0.1:1", "", "ipc://", "ipc://diloco-/\0", "ipc:///" + "x" * 5000):
        assert not can_be_entered(each)
    made.close()


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


def test_file_that_goes_behind_the_look_at_it_costs_a_moment(
    monkeypatch: pytest.MonkeyPatch, own_temporary_folder: Path
) -> None:
    """ZeroMQ alone would try it for ever."""

    def enters(address: str) -> bool:
        can = can_be_entered(address)
        for folder in own_temporary_folder.glob("diloco-*"):
            shutil.rmtree(folder)
        return can

    monkeypatch.setattr(link_module, "can_be_entered", enters)
    with (
        Broker(a_config(workers=1)) as broker,
        DiLoCoClient(broker.address, timeout=PATIENCE_S) as client,
    ):
        client.join(Layers(1))
        client.push({name_of(0): delta(0, 0)}, steps=1)
        client.pull()
        assert not way_of(client)
        assert client._link is not None
        assert client._link.session.connection.reconnections == 1
