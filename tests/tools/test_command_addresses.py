"""Every command takes the broker's address in the same ways, and refuses other text alike."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from diloco_broker import Broker
from diloco_protocol.clients.address_file import write_address
from diloco_tools.command import app
from kit.whole_run import make_config

# Each command, and what it cannot do without; the name that the option had before.
STEERING = ["status", "save", "kick", "set", "pause", "resume", "shutdown"]
STEERING += ["save-all", "stop-all", "promote"]
MORE = {"kick": ("w0", "--yes"), "set": ("--quorum", "1"), "stop-all": ("-y",)}
MORE["shutdown"] = ("--yes",)
COMMANDS: dict[tuple[str, ...], str] = {
    **{("broker", name, *MORE.get(name, ())): "--address" for name in STEERING},
    ("broker", "export"): "--address",
    ("broker", "plan"): "--address",
    ("broker", "standby", "--check"): "--of",
    ("worker", "doctor"): "--address",
    ("doctor",): "--address",
    ("top", "--once"): "--feed",
    ("dashboard",): "--feed",
    ("export-metrics",): "--feed",
}
NEED_ONE = (("broker", "plan"), ("broker", "standby", "--check"), ("worker", "run", "--", "true"))
WAYS = ("positional", "--server", "variable", "former")
NONE = "tcp://host:"  # no address: it lacks a port


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DILOCO_SERVER", "DILOCO_FEED", "DILOCO_KEYS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(make_config(save_dir=str(tmp_path / "run"))) as broker:
        yield broker


def call(words: tuple[str, ...], address: str, way: str) -> Result:
    """Run a command with its address given in this way."""
    given = {"positional": (address,), "variable": ()}.get(way, (way, address))
    other = "tcp://127.0.0.1:1"  # what is given comes before it
    environment = {"DILOCO_SERVER": address if way == "variable" else other}
    return CliRunner().invoke(app, [*words, *given], env=environment)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_what_is_no_address_is_refused_in_the_same_words(words: tuple[str, ...], way: str) -> None:
    option = COMMANDS[words] if way == "former" else way
    done = call(words, NONE, option)
    shown = {"positional": "ADDR", "variable": "DILOCO_SERVER"}.get(option, "--server")
    shown = "--feed" if option == "--feed" else shown
    assert done.exit_code == 2, done.output
    assert f"{shown} is '{NONE}'; it must be an address like tcp://" in done.output
    assert done.output.count("\n") == 1


@pytest.mark.parametrize("way", ["--server", "--address", "variable"])
def test_worker_takes_it_in_the_same_ways_but_for_words_that_belong_to_its_script(way: str) -> None:
    words = ("worker", "run", *((way, NONE) if way != "variable" else ()), "--", "true")
    environment = {"DILOCO_SERVER": NONE} if way == "variable" else {}
    done = CliRunner().invoke(app, list(words), env=environment)
    assert done.exit_code == 2
    assert f"is '{NONE}'; it must be an address like tcp://" in done.output


@pytest.mark.parametrize("words", NEED_ONE, ids=" ".join)
def test_address_that_is_missing_is_asked_for_in_the_same_words(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 2
    assert "address is missing; give --server or DILOCO_SERVER" in done.output


@pytest.mark.parametrize("words", [("broker", "status"), ("worker", "doctor")], ids=" ".join)
def test_run_without_a_broker_cannot_be_asked(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, list(words), env={"DILOCO_SERVER": "local"})
    assert done.exit_code == 2
    assert "DILOCO_SERVER is local" in done.output and "without a broker" in done.output


def test_relay_sends_no_sparse_means() -> None:
    words = ["broker", "relay", "--parent", "tcp://host:1", "--parent-wire-dtype", "sparse"]
    done = CliRunner().invoke(app, [*words, "--insecure", "--check"])
    assert done.exit_code == 2 and "--parent-wire-dtype is sparse" in done.output, done.output


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_two_addresses_are_refused(words: tuple[str, ...]) -> None:
    option = COMMANDS[words]
    done = CliRunner().invoke(app, [*words, "tcp://a:1", option, "tcp://b:2"])
    assert done.exit_code == 2, done.output
    assert "Both tcp://a:1 and" in done.output and "tcp://b:2" in done.output


@pytest.mark.parametrize(
    ("words", "said", "way"),
    [
        (("broker", "status"), "waiting", "positional"),
        (("broker", "plan"), "no model", "variable"),
        (("broker", "export"), "no model", "--server"),
        (("top", "--once", "--timeout", "20"), "WAITING", "--server"),
        (("doctor",), "broker", "variable"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else each,
)
def test_control_address_alone_finds_the_feed(
    broker: Broker, words: tuple[str, ...], said: str, way: str
) -> None:
    """Displays ask at it for the feed, which is at a port of its own."""
    assert said in call(words, broker.address, way).output


@pytest.mark.parametrize("kind", ["file", "several"])
def test_file_and_several_addresses_are_taken(broker: Broker, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "address"
    write_address(file, broker.address, broker.feed_address)
    address = f"file://{file}" if kind == "file" else f"tcp://127.0.0.1:1,{broker.address}"
    assert "waiting" in call(("broker", "status"), address, "--server").output
    shown = call(("top", "--once", "--timeout", "20"), address, "variable")
    assert "WAITING" in shown.output, shown.output


def test_feed_variable_is_for_displays_alone_and_comes_before_the_server(broker: Broker) -> None:
    environment = {"DILOCO_FEED": broker.feed_address, "DILOCO_SERVER": "tcp://127.0.0.1:1"}
    shown = CliRunner().invoke(app, ["top", "--once", "--timeout", "20"], env=environment)
    assert "WAITING" in shown.output
    asked = CliRunner().invoke(app, ["broker", "status", "--timeout", "0.2"], env=environment)
    assert "No answer from tcp://127.0.0.1:1" in asked.output
