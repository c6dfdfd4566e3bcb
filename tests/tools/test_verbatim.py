"""Square brackets in names are text: no display takes them for markup, nor ours for theirs."""

import ast
import io
from pathlib import Path
from typing import Any

import pytest

import diloco_tools.demo.cli
from diloco_broker.cli.status_text import as_text
from diloco_lab.bench.report.figures import figure, tables
from diloco_protocol.clients import Answer
from diloco_protocol.feed import parse_snapshot
from diloco_tools.terminal import console
from kit.feed_snapshots import frame, status, worker
from kit.paths import MODULES
from kit.tool_results import RESULTS, report
from kit.top_screen import LARGE, ScreenPilot, screen
from kit.top_text import drawn

# What Rich or Textual would take for a style, an end of one, a variable of a theme, or an emoji.
NAMES = ["[red]x", "[RED]x[/]", "[$primary]x", "[/]", "w[0]", "x\\", ":boom:", "[@click=app.quit]x"]
EVERY_NAME = pytest.mark.parametrize("name", NAMES)


def unknown_peers(name: str) -> dict[str, Any]:
    """A snapshot in which every text of a worker is `name`."""
    return status(
        run=name,
        workers=[worker(name, host=name, state=name, health=name, extra={name: name})],
        round={
            "number": 3,
            "expected": [name, "b"],
            "missing": [name],
            "phase": "open",
            "arrived": [],
            "age_s": 1.0,
        },
        rejections=[{"age_s": 1.0, "worker": name, "code": name, "text": name}],
        events=[{"sequence": 1, "age_s": 1.0, "level": "error", "text": name}],
        checkpoint={"folder": name, "round": 3, "age_s": 1.0, "error": name},
    )


def without_matplotlib(*_: object) -> bool:
    raise ImportError("No module named 'matplotlib'")


def test_extra_to_install_is_named_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "[red]runs[bold]"
    folder.mkdir()
    out = io.StringIO()
    monkeypatch.setattr(diloco_tools.demo.cli, "draw", without_matplotlib)
    diloco_tools.demo.cli.write(RESULTS, folder, console(file=out, width=200))
    assert "pip install 'diloco-broker[plot]'" in out.getvalue()
    assert f"are in {folder}\n" in out.getvalue()


@EVERY_NAME
def test_tables_show_rows_as_they_are(name: str) -> None:
    out = io.StringIO()
    figures = [figure(name, name, name, 9.0, "ms", target="turn")]
    for table in tables(report(*figures)):
        console(file=out, width=200).print(table)
    assert out.getvalue().count(name) == 4
    assert "NOT MET" in out.getvalue() and "[bold" not in out.getvalue()


@EVERY_NAME
def test_one_screen_and_status_show_names_as_they_are(name: str) -> None:
    text = drawn(unknown_peers(name), width=200)
    for line in (f"run {name[:8]}", f"missing: {name}", f"NOT SAVED: {name}", f"error: {name}"):
        assert line in text
    assert f"{name}: {name}" in text
    assert f"\n{name} " in text
    told = as_text(unknown_peers(name))
    assert f"missing: {name}" in told and f"\n{name} " in told and f"NOT SAVED: {name}" in told


@pytest.mark.parametrize("name", ["[/]", "[@click=app.quit]x", "x\\"])
@screen({"size": LARGE})
async def test_full_screen_shows_names_verbatim(pilot: ScreenPilot, name: str) -> None:
    await pilot.hears(parse_snapshot(frame(unknown_peers(name) | {"sequence": 50})), after_s=1.0)
    await pilot.sees(f" {name} ", f"run {name[:8]}", f"error: {name}", f"{name}: {name}")
    await pilot.press("enter")
    await pilot.sees(
        f"Worker {name} ", f"Worker                   {name}", f"{name[:24]:<25}{name}"
    )
    await pilot.press("escape", "k")
    await pilot.sees(f"Kick {name} on {name}?")
    pilot.broker.answer = Answer(False, f"There is no {name}.")
    await pilot.press("y")
    await pilot.sees(f"There is no {name}.")
    await pilot.press("S")
    await pilot.sees(f"Type {name[:8]} and press enter")


@pytest.mark.slow
def test_no_console_reads_markup() -> None:
    """What is printed for people takes its styles from `Text`, and brackets in a name as they are."""
    for path in MODULES.values():
        for call in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)):
            called = call.func.id if isinstance(call.func, ast.Name) else ""
            given = {word.arg: ast.unparse(word.value) for word in call.keywords}
            where = f"{path.name}:{call.lineno}"
            assert called != "Console" or given.get("markup") == "False", f"{where} reads markup"
            assert called != "TextColumn" or given.get("markup") == "False", f"{where} reads markup"
