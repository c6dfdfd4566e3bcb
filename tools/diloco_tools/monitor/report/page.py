"""The report: the dashboard's page with its data inlined, as one file that fetches nothing.

Its Content-Security-Policy allows only its own script and style sheet.
"""

import json
import re
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

from diloco_protocol.feed import json_safe
from diloco_protocol.monitor.fields import BAD, GOOD, LEVELS, SETTINGS, UNEASY, Field, Part
from diloco_protocol.quantities import (
    FORMATS,
    NONE,
    byte_size,
    clock,
    count,
    duration,
    figure,
    moment,
    plural,
    setting,
)
from diloco_tools.monitor.report.facts import Ended, Ending, Facts, Life
from diloco_tools.monitor.web.words import logged

ENDINGS = {
    Ending.OVER: (GOOD, "The run is over"),
    Ending.STOPPED: ("quiet", "The broker has stopped"),
    Ending.OPEN: (UNEASY, "No end is recorded"),
}
ENDED = {
    Ended.HERE: Part("present", GOOD),
    Ended.AWAY: Part("did not rejoin after a restart of the broker", UNEASY),
    Ended.LEFT: Part("left", "quiet"),
    Ended.DIED: Part("died", BAD),
    Ended.KICKED: Part("removed by an operator", UNEASY),
}
MOST_ROWS = 200
# Modules of the page, each after those that it imports.
MODULES = ("dom", "api", "charts", "control", "app")


def _ending(life: Life) -> Part:
    if life.ending is None:
        return Part("killed, or its machine went down: no last line", BAD)
    words, tone = ("the run is over", GOOD) if life.is_over else ("stopped", "quiet")
    return Part(f"{words}: {life.ending}", tone)


def title_of(path: str) -> str:
    """The label of a setting; its path if the catalogue lacks it."""
    field = SETTINGS.get(path)
    return path if field is None else field.label[:1].upper() + field.label[1:]


def _value(path: str, value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and path in SETTINGS:
        return FORMATS[SETTINGS[path].format](value)
    return setting(value)


def _loss(facts: Facts) -> str:
    if facts.first_loss is None:
        return NONE
    best = f"best {figure(facts.best_loss)} ({facts.best_loss_round:,})"
    return f"{figure(facts.first_loss)} → {figure(facts.last_loss)}, {best}"


def _times(facts: Facts) -> str:
    times = (facts.round_median_s, facts.round_p95_s, facts.round_longest_s)
    return "median {}, 95% within {}, at most {}".format(*map(duration, times))


# fmt: off
# Of `Facts`: the header, and further figures.
HEADLINE = (
    Field("mode", "Mode", say=lambda of: of.mode or NONE),
    Field("began_at", "Began, UTC", say=lambda of: moment(of.began_at, "%d %b %Y %H:%M")),
    Field("ended_at", "Lasted", say=lambda of: clock(of.ended_at - of.began_at)),
    Field("rounds", "Rounds", format="count"),
    Field("workers", "Workers", say=lambda of:
        f"{len(of.workers) + of.workers_left_out:,}, at most {of.most_alive:,} at once"),
    Field("model.parameters", "Parameters", format="parameters"),
)
FIGURES = (
    Field("last_loss", "Loss", say=_loss),
    Field("round_median_s", "Time", say=_times),
    Field("contributions", "Counted",
        say=lambda of: plural(of.contributions, "complete push", "complete pushes")),
    Field("deaths", "Deaths", say=lambda of: count(sum(each.deaths for each in of.workers))),
    Field("bytes_up", "Traffic",
        say=lambda of: f"{byte_size(of.bytes_up)} up, {byte_size(of.bytes_down)} down"),
    Field("lives", "Broker", say=lambda of: plural(len(of.lives), "start")),
    Field("warnings", "Logged",
        say=lambda of: f"{plural(of.warnings, 'warning')}, {plural(of.errors, 'error')}"),
)
# The columns of the tables; a field without a label is shown below the previous one.
OF_WORKER = (
    Field("id", "Worker", format="text"),
    Field("hosts", "", say=lambda of: ", ".join(of.hosts)),
    Field("ended", "At the end", say=lambda of: ENDED[of.ended]),
    Field("via", "Via", format="text"),
    Field("contributions", "Counted", format="count"),
    Field("steps_per_s", "Speed", format="amount"),
    Field("loss", "Loss, norm", format="figure"),
    Field("delta_norm", "", format="norm"),
    Field("staleness_mean", "Stale, most", format="norm"),
    Field("staleness_most", "", format="count"),
    Field("bytes_up", "Up, down", format="bytes"),
    Field("bytes_down", "", format="bytes"),
    Field("deaths", "Deaths, returns", format="count"),
    Field("returns", "", format="count"),
)
OF_LIFE = (
    Field("began_at", "Began, UTC", format="moment"),
    Field("ending", "How it ended", say=_ending),
    Field("ended_at", "For", say=lambda of: clock(of.ended_at - of.began_at)),
    Field("first", "Rounds", say=lambda of: NONE if of.first is None else f"{of.first} to {of.last}"),
    Field("bytes_up", "Up, down", format="bytes"),
    Field("bytes_down", "", format="bytes"),
    Field("cpu_s", "CPU", format="duration"),
    Field("rss_bytes", "Memory", format="bytes"),
)
OF_SAID = (
    Field("level", "Level", say=lambda of: Part(of.level, LEVELS[of.level])),
    Field("text", "Last message", format="text"),
    Field("count", "Times", format="count"),
    Field("last_at", "Last, UTC", format="moment"),
)
OF_ACTION = (
    Field("at", "Time, UTC", format="moment"),
    Field("text", "Action", format="text"),
    Field("who", "Operator", say=lambda of: of.who + ("" if of.is_proven else " (unproven)")),
    Field("round", "Round", format="whole"),
)
OF_CHANGE = (
    Field("at", "Time, UTC", format="moment"),
    Field("name", "Setting", say=lambda of: title_of(of.name)),
    Field("after", "Change",
        say=lambda of: f"{_value(of.name, of.before)} → {_value(of.name, of.after)}"),
    Field("by_restart", "By",
        say=lambda of: "options of a restart" if of.by_restart else "an operator"),
)
# fmt: on


def page_of(facts: Facts) -> str:
    """The report as HTML."""
    session = {"mode": "report", "reading": True, "steering": False, "columns": _titles(OF_WORKER)}
    state = {"words": _words(facts), "series": facts.series, "whole": True, "clock": 0}
    state["origin"] = facts.began_at
    answers = json_safe({"/api/session": session, "/api/state?after=0": state}, 64)
    data = json.dumps(answers, allow_nan=False).replace("<", "\\u003c")
    script, style = _script(), _style()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="referrer" content="no-referrer">\n<style>{style}</style>\n</head>'
    )
    tail = (
        f'<script type="application/json" id="data">{data}</script>\n'
        f'<script type="module">{script}</script>\n</body>'
    )
    page = re.sub(r"(?m)^  <(link|script) .*\n", "", _asset("index.html"))
    return page.replace("</head>", head).replace("</body>", tail)


@cache
def _asset(name: str) -> str:
    return (files("diloco_tools.monitor.web") / "assets" / name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    """The modules in one script, in the order of their imports."""
    modules = "".join(_asset(f"{name}.js") for name in MODULES)
    modules = re.sub(r"(?m)^import .*\n|^export ", "", modules)
    library, licence = _asset("uplot/uPlot.iife.min.js"), _asset("uplot/LICENSE")
    return f"/* {licence} */\n{library}\n{modules}"


@cache
def _style() -> str:
    return _asset("uplot/uPlot.min.css") + _asset("style.css")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _words(facts: Facts) -> dict[str, Any]:
    """The texts of the page, in the form of `diloco_tools.monitor.web.words`."""
    tone, ending = ENDINGS[facts.ending]
    many = len(facts.workers) + facts.workers_left_out
    left_out = many - len(facts.workers[:MOST_ROWS])
    more = f"; {plural(left_out, 'more worker')} not shown" if left_out else ""
    version = f" Broker {facts.lives[-1].version}." if facts.lives[-1].version else ""
    return {
        "run": f"run {facts.run or 'unnamed'}",
        "title": f"Run {facts.run or 'unnamed'}: report",
        "badge": (tone, ending, ""),
        "notice": (UNEASY, "Note", facts.remarks) if facts.remarks else None,
        "facts": [(field.label, [field.part(facts)]) for field in HEADLINE],
        "counts": f"last losses and norms, median speeds{more}",
        "rows": [(field.label, [field.part(facts)]) for field in FIGURES],
        "workers": _rows(OF_WORKER, facts.workers[:MOST_ROWS]),
        "empty": "No worker has joined.",
        "events": [
            logged(moment(each.at, "%d %b %H:%M:%S"), each.level, each.text)
            for each in reversed(facts.events)
        ],
        "rejections": [],
        "insecure": False,
        "about": f"From {plural(facts.lines, 'line')} of the history, by diloco-report.{version}",
        "panels": [
            _panel("lives", "Starts of the broker", "", OF_LIFE, facts.lives),
            _panel("warnings", "Warnings and errors", "No warnings.", OF_SAID, facts.said)
            | {"note": "grouped if they differ only in numbers"},
            _panel("orders", "Operator actions", "No operator actions.", OF_ACTION, facts.actions),
            _panel("changes", "Changes of settings", "No changes.", OF_CHANGE, facts.changes),
            _panel("settings", "Settings at the end", "No settings were recorded.")
            | {"values": [(label, [Part(text)]) for label, text in settings(facts)]},
        ],
    }


def _titles(fields: Sequence[Field]) -> list[dict[str, str]]:
    classes = {"id": "id", "ended": "health", "via": "via"}
    return [
        {"key": classes.get(field.path, "wide" * (place == 1)), "title": field.label}
        for place, field in enumerate(fields)
        if field.label
    ]


def _rows(fields: Sequence[Field], records: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows of a table of the page."""
    found: list[dict[str, Any]] = []
    for number, record in enumerate(records):
        cells: list[tuple[str, str, str]] = []
        for field in fields:
            text, tone = field.part(record) if field.say else (field.text(record), "")
            if field.label:
                cells.append((text, tone, ""))
            else:
                cells[-1] = (*cells[-1][:2], text)
        sort = [field.value(record) for field in fields if field.label]
        found.append({"id": str(number), "cells": cells, "sort": sort})
    return found


def _panel(
    id: str, title: str, empty: str, fields: Sequence[Field] = (), records: Sequence[Any] = ()
) -> dict[str, Any]:
    """A section with a table of the newest records."""
    more = len(records) - MOST_ROWS
    return {
        "id": id,
        "title": title,
        "note": f"{more:,} older ones are not shown" if more > 0 else "",
        "empty": empty,
        "columns": _titles(fields),
        "rows": _rows(fields, records[-MOST_ROWS:]),
    }


def settings(facts: Facts) -> list[tuple[str, str]]:
    """Labels and values of the settings, those of the catalogue first."""
    one_fragment = facts.settings.get("num_fragments") in (None, 1)
    names = [*filter(facts.settings.__contains__, SETTINGS), *sorted(facts.settings)]
    return [
        (title_of(name), _value(name, facts.settings[name]))
        for name in dict.fromkeys(names)
        if facts.settings[name] not in (None, "[]")
        and not (one_fragment and name.startswith("fragment_"))
    ]
