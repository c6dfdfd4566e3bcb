"""Every command of the project prints its version."""

from __future__ import annotations

from importlib.metadata import entry_points, version

import pytest
import typer
from typer.testing import CliRunner

COMMANDS = {
    each.name: each
    for each in entry_points(group="console_scripts")
    if each.dist is not None and each.dist.name == "diloco-broker"
}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_prints_its_version(name: str) -> None:
    app = COMMANDS[name].load()
    assert isinstance(app, typer.Typer)
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output.strip()) == (0, f"diloco-broker {version('diloco-broker')}")
