"""The page of diloco-report: fetches nothing, runs only its own script, shows every text as it is."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from diloco_tools.monitor.report.digest import read_run
from kit.past_runs import closed, event, line, start, write_run
from kit.report_pages import Page, action, facts_of, page

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
    return page(
        facts_of(folder, *lines, actions=(action(AT + 5, text, text, who=text, before=text),))
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_what_strangers_say_is_text_wherever_it_stands(tmp_path: Path, text: str) -> None:
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
