"""The daemon's command line: what it refuses, in one sentence each, and that it agrees with the API."""

import gc
import inspect
import json
import logging
import socket
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from diloco_broker import Broker, BrokerConfig
from diloco_broker.cli.app import app
from diloco_broker.cli.serve import serve
from diloco_broker.shell.process_memory import keep_what_is_there
from diloco_broker.storage import checkpoint
from diloco_protocol.errors import UsageError
from kit.checkpoints import RUN, a_checkpoint


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--bind", "tcp://0.0.0.0:8512"], "--keys"),
        (["--feed", "tcp://0.0.0.0:8513"], "--insecure"),
        (["--keys", "/nowhere", "--dashboard"], "/nowhere"),
        (["--workers", "2", "--quorum", "3"], "--quorum"),
        (["--no-save", "--resume", "old-run"], "old-run"),
        (["--fresh", "--resume", "old-run"], "old-run"),
        (["--fresh", "--save-dir", "run", "--keys", "run/keys"], "--keys"),
        (["--fresh", "--no-save"], "--fresh"),
        (["--preset", "lora"], "diloco, finetune, sparseloco, decoupled or diloco-paper"),
        (["--preset", "decoupled", "--mode", "async"], "Preset decoupled: --quorum 1"),
        (["--model", "/nowhere/model.pt"], "/nowhere/model.pt"),
        (["--model", str(Path(__file__))], "cannot be read"),
        (["--model", str(Path(__file__).parent)], "cannot be read"),
    ],
)
def test_wrong_option_is_one_line_and_exit_2(options: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["serve", *options])
    assert (result.exit_code, result.output.count("\n")) == (2, 1), result.output
    assert named in result.output


def test_options_are_checked_and_nothing_is_served(tmp_path: Path) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        good = ["serve", "--bind", bind, "--save-dir", str(tmp_path / "run"), "--check"]
        result = CliRunner().invoke(app, good)
        assert result.exit_code == 0
        for grace in ("auto", "2.5"):
            result = CliRunner().invoke(app, [*good, "--quorum", "1", "--grace", grace])
            assert result.exit_code == 0, result.output
    assert not (tmp_path / "run").exists()
    wrong = CliRunner().invoke(app, [*good, "--quorum", "5"])
    assert wrong.exit_code == 2
    assert "quorum" in wrong.output


@pytest.mark.parametrize("command", [["serve"], ["standby", "--of", "127.0.0.1:1"]])
def test_preset_is_printed_with_what_overrides_it(command: list[str]) -> None:
    options = ["--preset", "finetune", "--outer-lr", "0.5", "--check"]
    result = CliRunner().invoke(app, [*command, *options])
    assert result.stdout.splitlines() == [
        "Preset finetune: --outer sgd, --outer-momentum 0, --fragment-update-alpha 0; overridden: "
        "--outer-lr 0.5.",
        "The options are valid.",
    ]
    default = ["--preset", "diloco-paper", "--outer-momentum-warmup", "linear:200:0.5", "--check"]
    said = CliRunner().invoke(app, [*command, *default]).stdout
    assert "overridden: --outer-momentum-warmup linear:200:0.5." in said, "a given default is given"


def test_only_serve_begins_a_run_afresh() -> None:
    result = CliRunner().invoke(app, ["standby", "--fresh"])
    assert result.exit_code == 2
    assert "No such option" in result.output


def test_unknown_keyword_gets_the_nearest_one() -> None:
    of_config: Any = {"sync_evry": 10}
    with pytest.raises(UsageError, match=r"sync_evry.*did you mean sync_every\?"):
        BrokerConfig(**of_config)
    of_broker: Any = {"initail": None}
    with pytest.raises(UsageError, match=r"initail.*did you mean initial\?"):
        Broker(BrokerConfig(), **of_broker)
    moved: Any = {"workers": 2}
    with pytest.raises(UsageError, match=r"BrokerConfig\(workers="):
        Broker(**moved)


def test_options_equal_the_fields_of_the_configuration() -> None:
    options = set(inspect.signature(serve).parameters) - {
        "address_file",
        "check",
        "context",
        "over_is_success",
        "model",
        "verbose",
        "no_save",
        "preset",
        "dashboard",
    }
    defaults = {field.name: field.default for field in fields(BrokerConfig)}
    assert options == set(defaults) - {"chunk_elements"}
    for name, parameter in inspect.signature(serve).parameters.items():
        if name in options - {"save_dir"}:  # the daemon saves by itself, a Broker where it is told
            assert parameter.default == defaults[name], name


@pytest.mark.parametrize(
    "bind", ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://10.0.0.1:1", "tcp://host:1"]
)
def test_other_addresses_are_refused_unless_insecure(bind: str) -> None:
    for option in ("bind", "feed"):
        with pytest.raises(UsageError, match="--insecure"):
            BrokerConfig(**{option: bind})  # type: ignore[arg-type]
        BrokerConfig(**{option: bind}, insecure=True)  # type: ignore[arg-type]
        BrokerConfig(**{option: bind}, keys="keys")  # type: ignore[arg-type]


def test_garbage_collector_skips_modules_loaded_before_serving() -> None:
    """Modules are some 100,000 objects; to look through them all is a turn far too long."""
    before = gc.get_threshold()
    gc.unfreeze()  # what the tests have frozen
    assert len(gc.get_objects()) > 10_000
    try:
        keep_what_is_there()
        assert len(gc.get_objects()) < 10_000 < gc.get_freeze_count()
        assert sys.version_info >= (3, 14) or gc.get_threshold()[2] > 1000, "full ones are rare"
    finally:
        gc.set_threshold(*before)


# `inspect`: which checkpoints there are, whether they are sound, what they hold.


def inspected(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in (4, 5):
        checkpoint.save(tmp_path, a_checkpoint(number), keep=3)
    return tmp_path


def damage_the_newest(folder: Path) -> None:
    file = next(checkpoint.at(folder)[0].glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_bit_that_has_flipped_is_found_unless_the_files_are_trusted(folder: Path) -> None:
    damage_the_newest(folder)
    result = inspected(folder)
    assert result.exit_code == 1
    damaged, sound = result.output.splitlines()[2:4]
    assert "DAMAGED" in damaged and "before round 4" in sound
    assert "versions    4, 5" in result.output, "what is told of the run is from the sound one"
    assert inspected(folder, "--quick").exit_code == 0


def test_inspect_prints_one_json_object(folder: Path) -> None:
    damage_the_newest(folder)
    result = inspected(folder, "--json")
    assert result.exit_code == 1
    newest, older = json.loads(result.output)["checkpoints"]
    assert not newest["sound"] and newest["problem"]
    expected = {"run": RUN, "round": 4, "parameters": 22, "tensors": 5, "versions": [4, 5]}
    assert {name: older[name] for name in expected} == expected


def test_folder_without_checkpoints_is_named(tmp_path: Path) -> None:
    result = inspected(tmp_path)
    assert result.exit_code == 2
    assert str(tmp_path) in result.output
