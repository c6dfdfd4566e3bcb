"""`diloco-broker inspect`: which checkpoints there are, whether they are sound, what they hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from diloco_broker.cli.app import app
from diloco_broker.storage import checkpoint
from kit.checkpoints import RUN, a_checkpoint


def inspect(*arguments: object) -> Result:
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
    result = inspect(folder)
    assert result.exit_code == 1
    damaged, sound = result.output.splitlines()[2:4]
    assert "DAMAGED" in damaged and "before round 4" in sound
    assert "versions    4, 5" in result.output, "what is told of the run is from the sound one"
    assert inspect(folder, "--quick").exit_code == 0


def test_programs_get_one_object(folder: Path) -> None:
    damage_the_newest(folder)
    result = inspect(folder, "--json")
    assert result.exit_code == 1
    newest, older = json.loads(result.output)["checkpoints"]
    assert not newest["sound"] and newest["problem"]
    expected = {"run": RUN, "round": 4, "parameters": 22, "tensors": 5, "versions": [4, 5]}
    assert {name: older[name] for name in expected} == expected


def test_folder_without_checkpoints_is_named(tmp_path: Path) -> None:
    result = inspect(tmp_path)
    assert result.exit_code == 2
    assert str(tmp_path) in result.output
