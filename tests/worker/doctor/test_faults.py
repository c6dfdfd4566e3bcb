"""The doctor reports each fault as a sentence, with its own exit code."""

import json
import shlex
import socket
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
from diloco_tools.plan.cli import app as planner
from diloco_worker.cli.app import app
from diloco_worker.doctor.examination import Fault
from kit.keyed_broker import file_of, forged, key, written
from kit.other_servers import other_server
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
    """The command's JSON; checks that its exit code matches."""
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


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        ({"sync_every": 10}, ["H = 10 is small", "learning rate is 0.7; recommended: at most 0.4"]),
        ({"outer_lr": 0.3, "workers": 4}, ["is 0.3; recommended: at least 0.6"]),
        ({"sync_every": 10, "outer": "sgd", "outer_lr": 1.0}, []),
    ],
)
def test_settings_of_the_outer_optimizer_that_rarely_train_well_are_noted(
    options: dict[str, Any], notes: list[str]
) -> None:
    with Broker(BrokerConfig(**LOCAL, **options)) as running:
        told = doctor(running.address)
    assert told["exit_code"] == 0 and len(told["notes"]) == len(notes)
    assert all(said in note for said, note in zip(notes, told["notes"], strict=True))


def test_healthy_connection_has_no_faults(broker: Broker) -> None:
    told = doctor(broker.address, "--parameters", "124M", "--step-time", "0.5")
    assert (told["exit_code"], told["wrong"], told["notes"]) == (0, [], [])
    assert abs(told["clock_ahead_s"]) <= told["clock_error_s"] + 0.01
    assert 0 < told["round_trip_s"]["median"] <= told["round_trip_s"]["worst"]
    assert told["up_bytes_per_s"] > 1e6 and told["down_bytes_per_s"] > 1e6
    program, *words = shlex.split(told["plan_command"])
    assert program == "diloco-plan" and {"124000000", "0.5s"} <= set(words)
    planned = CliRunner().invoke(planner, [*words, "--json"])
    assert planned.exit_code == 0 and json.loads(planned.stdout)["utilisation"] > 0, planned.output


def test_accepted_key_measures_through_encryption(keyed: Broker, folder: KeyFolder) -> None:
    told = doctor(keyed.address, "--keys", file_of(folder, "w0"))
    assert (told["exit_code"], told["key"]) == (0, {"role": "worker", "name": "w0"})
    assert told["asks_for_keys"] and told["up_bytes_per_s"] and told["down_bytes_per_s"]


def test_address_or_its_file_is_read(broker: Broker, tmp_path: Path) -> None:
    finds(Fault.USAGE, "must be an address", "broker:")
    file = tmp_path / "address"
    finds(Fault.USAGE, "does not exist yet", file.as_uri())
    file.write_text(f"{broker.address}\n")
    assert doctor(file.as_uri())["exit_code"] == 0


def test_unresolvable_host_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    finds(Fault.NAME, "The name broker.lan cannot be resolved", "broker.lan:8512")


def test_port_without_a_listener_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    finds(Fault.PORT, "Nothing listens at", f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("says", "how"), [(b"SSH-2.0-OpenSSH_9.2\r\n", "another protocol"), (b"", "sent no greeting")]
)
def test_other_server_is_not_taken_for_a_broker(says: bytes, how: str) -> None:
    with other_server(says) as address:
        finds(Fault.NOT_A_BROKER, how, address)


def test_feed_address_is_recognized(broker: Broker) -> None:
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
        (lambda folder, to: written(forged(folder, "w0"), to / "x"), Fault.WRONG_KEY, "rejects"),
        (of_another_broker, Fault.WRONG_KEY, "another broker"),
    ],
    ids=["none", "readable by all", "not there", "unknown", "of another broker"],
)
def test_missing_or_rejected_key_is_reported(
    keyed: Broker, folder: KeyFolder, tmp_path: Path, make: Any, fault: Fault, word: str
) -> None:
    file = make(folder, tmp_path)
    finds(fault, word, keyed.address, *(("--keys", file) if file else ()))


def test_key_for_a_broker_without_keys_is_reported(broker: Broker, folder: KeyFolder) -> None:
    file = file_of(folder, "w0")
    finds(Fault.UNWANTED_KEY, "uses no keys", broker.address, "--keys", file)


def test_monitor_key_measures_everything_but_the_link(keyed: Broker, folder: KeyFolder) -> None:
    file = file_of(folder, "display")
    told = finds(Fault.LINE, "may not send probes", keyed.address, "--keys", file)
    assert told["clock_ahead_s"] is not None
    assert "cannot train" in told["notes"][0]


def test_other_protocol_version_is_reported(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(message: messages.Message) -> bytes:
        return bytes(msgpack.packb({"v": 2, "kind": message.kind}))

    monkeypatch.setattr("diloco_protocol.frames.encode", other)
    finds(Fault.VERSION, "version 2", broker.address)


def test_clock_difference_is_reported(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time

    class Ahead:
        def __getattr__(self, name: str) -> Any:
            return (lambda: real() + 93) if name == "time" else getattr(time, name)

    monkeypatch.setattr(loop, "time", Ahead())
    told = finds(Fault.CLOCK, "93 s ahead of", broker.address)
    assert told["up_bytes_per_s"], "the link is measured nevertheless"
