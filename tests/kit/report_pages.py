"""A report as a browser gets it: its texts by section, and all that it refers to."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from diloco_tools.monitor.report.digest import read_run
from diloco_tools.monitor.report.facts import Facts
from diloco_tools.monitor.report.page import page_of
from kit.past_runs import write

VOID = {"meta", "br", "input"}


def facts_of(folder: Path, *lines: Any, actions: tuple[Any, ...] = ()) -> Facts:
    """What a history of these lines comes to, with what operators did."""
    write(folder / "history.jsonl", *lines)
    if actions:
        write(folder / "control.jsonl", *actions)
    return read_run(folder)


def action(at: float, what: str, text: str, **keys: Any) -> dict[str, Any]:
    whole = {"at": at, "epoch": "a0", "who": "anna", "what": what, "before": None, "after": None}
    return {**whole, "text": text, "is_proven": True, "run": "3fa2c1d09b11", "round": 3, **keys}


class Page(HTMLParser):
    """The page, parsed as a browser does: `tags` in their order, attributes, and the answer in it."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.markup = markup
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []  # tag, name, value
        self.style = self.script = self._data = ""
        self._open: list[tuple[str, str]] = []  # tags, with their ids
        self.feed(markup)
        self.close()
        assert not self._open, f"never closed: {self._open}"
        self.data: dict[str, Any] = json.loads(self._data)  # answers by path
        self.words: dict[str, Any] = self.data["/api/state?after=0"]["words"]
        self.series: dict[str, Any] = self.data["/api/state?after=0"]["series"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append((tag, dict(attrs).get("id") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1][0] == tag, f"</{tag}> in {self._open}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ("", "")
        if inside[0] == "style":
            self.style += data
        elif inside == ("script", "data"):
            self._data += data
        elif inside[0] == "script":
            self.script += data

    def text(self, section: str = "") -> str:
        """What is to be read in a section, or on the whole page, with one space between two texts."""
        words = self.words
        parts = {each["id"]: each for each in words["panels"]} | {
            "head": [words[name] for name in ("run", "badge", "notice", "facts", "rows")],
            "workers": [words[name] for name in ("counts", "workers", "empty")],
            "events": words["events"],
        }
        return " ".join(" ".join(_texts(parts[section] if section else parts)).split())


def _texts(value: Any) -> list[str]:
    """All texts in plain values; of a row of a table those in its cells."""
    if isinstance(value, dict):
        value = [each for name, each in value.items() if name not in ("id", "path", "sort", "key")]
    if isinstance(value, list):
        return [text for each in value for text in _texts(each)]
    return [value] if isinstance(value, str) else []


def page(facts: Facts) -> Page:
    return Page(page_of(facts))
