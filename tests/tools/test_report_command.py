"""diloco-report as a command: what it writes, what it prints, and its sentences."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import Result

from diloco_tools.monitor.report.cli import app
from diloco_tools.monitor.report.digest import read_run
from kit.past_runs import closed, line, start, write, write_run
from kit.report_pages import Page
from kit.web_commands import run


def report(*arguments: object) -> Result:
    return run(app, *map(str, arguments))


def complaint(*arguments: object, code: int = 2) -> str:
    """The one sentence of a report that was not made."""
    result = report(*arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    (sentence,) = result.stderr.splitlines()
    return sentence


@pytest.mark.parametrize("given", ["", "history.jsonl"])
def test_page_is_written_beside_the_history(tmp_path: Path, given: str) -> None:
    write_run(tmp_path, 5)
    result = report(tmp_path / given)
    assert (result.exit_code, result.stdout) == (0, f"report {tmp_path / 'report.html'}\n")
    shown = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "The broker has stopped" in shown.text("head")
    assert sorted(os.listdir(tmp_path)) == ["history.jsonl", "report.html"], "nothing else is left"


def test_page_is_written_where_it_is_asked_for_and_replaces_the_one_before(tmp_path: Path) -> None:
    write_run(tmp_path, 5)
    page = tmp_path / "here.html"
    page.write_text("an older one")
    assert report(tmp_path, "--out", page).exit_code == 0
    assert page.read_text().startswith("<!doctype html>")
    assert not (tmp_path / "report.html").exists()


def test_same_history_gives_the_same_page(tmp_path: Path) -> None:
    write_run(tmp_path, 30)
    pages = [tmp_path / "a.html", tmp_path / "b.html"]
    for page in pages:
        report(tmp_path, "--out", page)
    assert pages[0].read_bytes() == pages[1].read_bytes()


def test_json_has_the_same_facts_and_writes_nothing(tmp_path: Path) -> None:
    history = write(
        tmp_path / "history.jsonl",
        start(1e9),
        *(closed(1e9 + n, n, "a", "b", loss=2.0 if n else None) for n in range(9)),
        line("stop", 1e9 + 99, text="enough", run_is_over=True),
    )
    result = report(tmp_path, "--json")
    told, facts = json.loads(result.stdout), read_run(history)
    assert result.exit_code == 0 and os.listdir(tmp_path) == ["history.jsonl"]
    for name in ("rounds", "contributions", "bytes_up", "ending", "run", "last_words", "lines"):
        assert told[name] == getattr(facts, name)
    assert [each["id"] for each in told["workers"]] == ["a", "b"]
    assert told["workers"][0]["ended"] == "here"
    assert [each[4] for each in told["series"]["rounds"]] == [None, *[2.0] * 8]
    assert told["lives"][0]["is_over"] is True and told["settings"]["sync_every"] == 500


def test_history_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in complaint(tmp_path / "nowhere")
    assert str(tmp_path / "history.jsonl") in complaint(tmp_path)
    (tmp_path / "history.jsonl").touch()
    assert "empty" in complaint(tmp_path)
    write(tmp_path / "history.jsonl", b"nonsense")
    assert "damaged" in complaint(tmp_path)


def test_page_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    page = tmp_path / "no" / "folder.html"
    sentence = complaint(tmp_path, "--out", page, code=1)
    assert str(page) in sentence and "No such file or directory" in sentence
    (tmp_path / "taken").mkdir()
    assert "Is a directory" in complaint(tmp_path, "--out", tmp_path / "taken", code=1)
    assert sorted(os.listdir(tmp_path)) == ["history.jsonl", "taken"], "nothing is left behind"


def test_json_and_a_page_together_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    assert "--json" in complaint(tmp_path, "--json", "--out", tmp_path / "x.html")
