"""The doctor says each thing that is wrong in a sentence, and gives an exit code of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from typer.testing import CliRunner

from diloco_broker import Broker, BrokerConfig
from diloco_broker.shell import loop
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol import messages
from diloco_worker.cli.app import app
from diloco_worker.doctor.examination import Fault
from kit.keyed_broker import file_of, forged, key, written
from kit.process_kit import LOCAL

pytest_plugins = ("kit.key_fixtures",)
WITHIN = "1.5"  # seconds for each answer


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(BrokerConfig(**LOCAL)) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DILOCO_KEYS", raising=False)


def doctor(server: str, *options: object) -> dict[str, Any]:
    """What the command tells programs; its exit code is the one that it tells."""
    line = ["doctor", "--server", server, "--timeout", WITHIN, "--json", *map(str, options)]
    done = CliRunner().invoke(app, line)
    told: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == told["exit_code"]
    return told


def finds(fault: Fault, sentence: str, server: str, *options: object) -> dict[str, Any]:
    told = doctor(server, *options)
    assert [each["name"] for each in told["wrong"]] == [fault.name.lower()], told
    assert sentence in told["wrong"][0]["text"]
    assert told["exit_code"] == fault
    return told


def test_of_several_addresses_the_first_that_answers_is_examined(broker: Broker) -> None:
    told = doctor(f"tcp://127.0.0.1:1,{broker.address}")
    assert (told["server"], told["wrong"]) == (broker.address, [])


@contextlib.contextmanager
def listener(says: bytes) -> Iterator[str]:
    """Something that is no broker, and says this to whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = threading.Event()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(says)
                ends.wait(30)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            ends.set()
            thread.join(10)


def test_all_is_well(broker: Broker) -> None:
    told = doctor(broker.address, "--parameters", "124M", "--step-time", "0.5")
    assert (told["exit_code"], told["wrong"], told["notes"]) == (0, [], [])
    assert abs(told["clock_ahead_s"]) <= told["clock_error_s"] + 0.01
    assert 0 < told["round_trip_s"]["median"] <= told["round_trip_s"]["worst"]
    assert told["up_bytes_per_s"] > 1e6 and told["down_bytes_per_s"] > 1e6
    assert told["round"]["parameters"] == 124_000_000
    assert told["round"]["bytes_up"] == told["round"]["bytes_down"] == 4 * 124_000_000
    assert 0 < told["round"]["utilisation"] < 1 and told["round"]["sync_every_for_95"] >= 1


def test_key_that_is_let_in_measures_through_encryption(keyed: Broker, folder: KeyFolder) -> None:
    told = doctor(keyed.address, "--keys", file_of(folder, "w0"))
    assert (told["exit_code"], told["key"]) == (0, {"role": "worker", "name": "w0"})
    assert told["asks_for_keys"] and told["up_bytes_per_s"] and told["down_bytes_per_s"]


def test_address_that_is_none() -> None:
    finds(Fault.USAGE, "must be an address", "broker:")


def test_file_of_an_address_is_read(broker: Broker, tmp_path: Path) -> None:
    file = tmp_path / "address"
    finds(Fault.USAGE, "does not exist yet", file.as_uri())
    file.write_text(f"{broker.address}\n")
    assert doctor(file.as_uri())["exit_code"] == 0


def test_name_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    finds(Fault.NAME, "The name broker.lan is not known", "broker.lan:8512")


def test_port_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    finds(Fault.PORT, "Nothing listens at", f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("says", "how"), [(b"SSH-2.0-OpenSSH_9.2\r\n", "another protocol"), (b"", "says nothing")]
)
def test_something_else_listens_there(says: bytes, how: str) -> None:
    with listener(says) as address:
        finds(Fault.NOT_A_BROKER, how, address)


def test_feed_is_recognized(broker: Broker) -> None:
    finds(Fault.NOT_A_BROKER, broker.address, broker.feed_address)


def readable_by_all(folder: KeyFolder, _: Path) -> Path:
    file = file_of(folder, "w0")
    file.chmod(0o644)
    return file


def of_another_broker(folder: KeyFolder, to: Path) -> Path:
    return written(replace(key(folder, "w0"), broker=zmq.curve_keypair()[0]), to / "other.key")


@pytest.mark.parametrize(
    ("make", "fault", "word"),
    [
        (lambda *_: None, Fault.NO_KEY, "key"),
        (readable_by_all, Fault.KEY_FILE, "chmod 600"),
        (lambda _, to: to / "none.key", Fault.KEY_FILE, "none.key"),
        (lambda folder, to: written(forged(folder, "w0"), to / "x"), Fault.WRONG_KEY, "let"),
        (of_another_broker, Fault.WRONG_KEY, "another broker"),
    ],
    ids=["none", "readable by all", "not there", "unknown", "of another broker"],
)
def test_key_that_does_not_let_in(
    keyed: Broker, folder: KeyFolder, tmp_path: Path, make: Any, fault: Fault, word: str
) -> None:
    file = make(folder, tmp_path)
    finds(fault, word, keyed.address, *(("--keys", file) if file else ()))


def test_key_that_nobody_asks_for(broker: Broker, folder: KeyFolder) -> None:
    file = file_of(folder, "w0")
    finds(Fault.UNWANTED_KEY, "asks for no key", broker.address, "--keys", file)


def test_monitor_sees_all_but_the_line(keyed: Broker, folder: KeyFolder) -> None:
    file = file_of(folder, "display")
    told = finds(Fault.LINE, "may not measure the way", keyed.address, "--keys", file)
    assert told["clock_ahead_s"] is not None
    assert "cannot train" in told["notes"][0]


def test_other_version_of_the_protocol(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(message: messages.Message) -> bytes:
        return bytes(msgpack.packb({"v": 2, "kind": message.kind}))

    monkeypatch.setattr("diloco_protocol.frames.encode", other)
    finds(Fault.VERSION, "version 2", broker.address)


def test_clocks_that_differ(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time

    class Ahead:
        def __getattr__(self, name: str) -> Any:
            return (lambda: real() + 93) if name == "time" else getattr(time, name)

    monkeypatch.setattr(loop, "time", Ahead())
    told = finds(Fault.CLOCK, "93 s ahead of", broker.address)
    assert told["up_bytes_per_s"], "the line is measured all the same"
