"""A report as a reader sees it: its texts by section, its tables, and all that it refers to."""

from __future__ import annotations

import json
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from diloco_tools.monitor.report.facts import Facts
from diloco_tools.monitor.report.page import page_of
from diloco_tools.monitor.report.reading import read_run
from kit.past_runs import write

VOID = {"meta", "br"}


def facts_of(folder: Path, *lines: Any, actions: tuple[Any, ...] = ()) -> Facts:
    """What a history of these lines comes to, with what operators did."""
    write(folder / "history.jsonl", *lines)
    if actions:
        write(folder / "control.jsonl", *actions)
    return read_run(folder)


def action(at: float, what: str, text: str, **keys: Any) -> dict[str, Any]:
    """A line of the log of control actions."""
    whole = {"at": at, "epoch": "a0", "who": "anna", "what": what, "before": None, "after": None}
    return {**whole, "text": text, "is_proven": True, "run": "3fa2c1d09b11", "round": 3, **keys}


class Page(HTMLParser):
    """The page, parsed as a browser does: `tags` in their order, attributes, texts."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.markup = markup
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []  # tag, name, value
        self.texts: dict[str, list[str]] = defaultdict(list)  # by the id of the section
        self.titles: list[str] = []  # what a pointer is told
        self.style = self.script = ""
        self._data = ""
        self._open: list[tuple[str, str]] = []  # tags, with their ids
        self.feed(markup)
        self.close()
        assert not self._open, f"never closed: {self._open}"
        self.data: dict[str, Any] = json.loads(self._data)  # of the curves

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append((tag, dict(attrs).get("id") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1][0] == tag, f"</{tag}> in {self._open}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        inside = self._open[-1][0] if self._open else ""
        if inside == "style":
            self.style += data
        elif self._open and self._open[-1] == ("script", "data"):
            self._data += data
        elif inside == "script":
            self.script += data
        elif inside == "title":
            self.titles.append(data)
        else:
            section = next((name for tag, name in self._open if tag == "section"), "head")
            self.texts[section].append(data)

    def text(self, section: str = "") -> str:
        """What is to be read in a section, or on the whole page, with one space between two texts."""
        parts = (
            self.texts[section] if section else [t for each in self.texts.values() for t in each]
        )
        return " ".join(" ".join(parts).split())

    def chart(self, plot: str) -> dict[str, Any]:
        """One plot's data: its lines, and the words that it has of its own."""
        (found,) = (each for each in self.data["charts"] if each.get("id", each["plot"]) == plot)
        return dict(found)


def page(facts: Facts) -> Page:
    return Page(page_of(facts))
