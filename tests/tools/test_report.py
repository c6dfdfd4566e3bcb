"""The page of diloco-report: fetches nothing, runs only its own script, shows every text as it is."""

import json
import os
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from diloco_tools.monitor.report.cli import app
from diloco_tools.monitor.report.digest import read_run
from kit.past_runs import closed, event, line, start, write, write_run
from kit.report_pages import Page, action, facts_of, page
from kit.web_commands import run

AT = 1_700_000_000.0
HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</title><script>alert(1)</script>",
    "\"' onmouseover='alert(1)",
    "</style><svg/onload=alert(1)>",
    "&lt;b&gt; &amp; [red]x",
    "javascript:alert(1)",
]


def hostile_run(folder: Path, text: str) -> Page:
    """A run in which every text of a worker or operator is this one."""
    told = {"run": text, "version": text, "mode": text}
    lines: list[Any] = [
        start(AT, **told, settings={"outer": {"optimizer": text}, text: text}),
        event(AT + 1, f"{text} joins from {text}."),
        event(AT + 2, text, level=text),
        event(AT + 3, text, level="error"),
        closed(AT + 9, 0, text, "b"),
        event(
            AT + 9, f"Round 0 closed in 9.0 s: 1 of 2 expected workers averaged, without {text}."
        ),
        start(AT + 10, **told, settings={"outer": {"optimizer": f"{text}!"}, text: text}),
        line("stop", AT + 11, text=text),
    ]
    acted = action(AT + 5, text, text, who=text, before=text)
    return page(facts_of(folder, *lines, actions=(acted,)))


@pytest.mark.parametrize("text", HOSTILE)
def test_what_unauthenticated_peers_say_is_text_wherever_it_stands(
    tmp_path: Path, text: str
) -> None:
    shown, plain = hostile_run(tmp_path, text), hostile_run(tmp_path, "stranger")
    assert shown.tags == plain.tags, "no text makes an element, or ends one"
    assert [each[:2] for each in shown.attributes] == [each[:2] for each in plain.attributes]
    words = " ".join(text.split())
    for section in ("head", "workers", "warnings", "orders", "settings", "events"):
        assert words in shown.text(section), section


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_page_refers_to_nothing(tmp_path: Path, mode: str) -> None:
    rounds = [closed(AT + n, n, "a", "b", fragment=n % 3, staleness=n % 2) for n in range(40)]
    shown = page(facts_of(tmp_path, start(AT, mode=mode), *rounds))
    assert not {"link", "img", "iframe", "object", "base"} & set(shown.tags)
    for tag, name, value in shown.attributes:
        assert name not in ("src", "style", "srcset", "action") and not name.startswith("on")
        assert not name.endswith("href") or value.startswith("#"), f"{tag} refers to {value}"
        assert "url(" not in value
    assert "@import" not in shown.style and "url(" not in shown.style
    targets = {value for _, name, value in shown.attributes if name == "id"}
    links = {value[1:] for tag, name, value in shown.attributes if (tag, name) == ("a", "href")}
    assert links <= targets


def test_nothing_but_its_own_script_and_style_may_take_effect(tmp_path: Path) -> None:
    shown = page(read_run(write_run(tmp_path, 3)))
    (policy,) = (v for t, n, v in shown.attributes if (t, n) == ("meta", "content") and "src" in v)
    script, style = (
        f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
        for text in (shown.script, shown.style)
    )
    allowed = f"default-src 'none'; script-src {script}; style-src {style}; "
    assert policy == f"{allowed}base-uri 'none'; form-action 'none'"
    assert "Copyright (c) 2022 Leon Sorokin" in shown.script, "whose charts they are"


def test_page_says_what_the_facts_say(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        start(AT),
        event(AT + 1, "a joins from h."),
        closed(AT + 10, 0, "a", "b", loss=3.25),
        event(AT + 10, "Round 0 closed in 9.0 s: 2 of 3 expected workers averaged, without c."),
        event(AT + 12, "b counts as dead: nothing was heard from it for 30 s.", level="warning"),
        closed(AT + 50, 1, "a", loss=2.75),
        line("stop", AT + 60, text="anna asked for it", run_is_over=True),
        actions=(action(AT + 55, "shutdown", "the run is over, the broker stops"),),
    )
    shown = page(facts)
    head = shown.text("head")
    for words in ("The run is over", "3.250 → 2.750", "run 3fa2c1d09b11", "Lasted 00:01:00"):
        assert words in head
    assert "Deaths 1" in head and "2, at most 2 at once" in head
    assert "died" in shown.text("workers")
    assert "anna asked for it" in shown.text("lives")
    assert "b counts as dead" in shown.text("warnings")
    assert "the run is over, the broker stops anna 3" in shown.text("orders")
    assert "(H) 500" in shown.text("settings")
    assert [(each[1], each[4]) for each in shown.series["rounds"]] == [(0, 3.25), (1, 2.75)]


def test_rows_are_bounded_and_the_rest_is_counted(tmp_path: Path) -> None:
    names = [f"w{number:03}" for number in range(270)]
    shown = page(facts_of(tmp_path, closed(AT, 0, *names), closed(AT + 9, 1, *names)))
    assert len(shown.words["workers"]) == 200
    assert "70 more workers" in shown.text("workers")


# diloco-report as a command: what it writes, what it prints, and its sentences.


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
    written = page.read_text()
    assert written.startswith("<!doctype html>")
    assert report(tmp_path, "--out", page).exit_code == 0
    assert page.read_text() == written, "the same history gives the same page"
    assert not (tmp_path / "report.html").exists()


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
    assert "--json" in complaint(tmp_path, "--json", "--out", tmp_path / "x.html")
