"""Each of our names in the page for users of other libraries exists."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

from typer.main import get_command

from diloco_broker.cli.app import app
from diloco_worker import DiLoCoClient, DiLoCoWorker, WorkerOptions
from kit.paths import ROOT


def ours() -> set[str]:
    """The names in backticks in the last column of the tables."""
    _, text = (ROOT / "worker" / "NAMES.md").read_text().split("## For those who come from")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.rsplit(" | ", 1)[-1])}


def test_each_name_of_ours_is_there() -> None:
    names = ours()
    broker: Any = get_command(app)
    options = {name.removeprefix("serve ") for name in names if name.startswith("serve --")}
    known = {option for each in broker.commands["serve"].params for option in each.opts}
    assert len(options) > 10 and options <= known
    keywords = {name[:-1] for name in names if re.fullmatch(r"\w+=", name)}
    assert len(keywords) > 5 and keywords <= inspect.signature(DiLoCoWorker).parameters.keys()
    options = {name.split(".")[1] for name in names if name.startswith("WorkerOptions.")}
    assert options and options <= {each.name for each in fields(WorkerOptions)}
    attributes = {name.removeprefix("diloco.") for name in names if name.startswith("diloco.")}
    assert attributes and all(hasattr(DiLoCoWorker, name) for name in attributes)
    calls = {name.split(".")[1] for name in names if name.startswith("DiLoCoClient.")}
    assert calls and all(hasattr(DiLoCoClient, name) for name in calls)
    commands = {name.split()[1] for name in names if name.startswith("diloco-broker ")}
    known = {
        each.name or each.callback.__name__ for each in app.registered_commands if each.callback
    }
    assert commands and commands <= known
