"""The page as a whole: one file that fetches nothing, and can be sent as it is.

Jinja fills in the template, with every text escaped. The curves are drawn in the reader's browser by the
dashboard's own module of charts, from data within the page; the page's Content-Security-Policy lets
nothing but this one script and this one style sheet take effect.
"""

from __future__ import annotations

import re
from base64 import b64encode
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import pairwise
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from diloco_protocol.quantities import (
    NONE,
    byte_size,
    clock,
    count,
    figure,
    moment,
    parameters,
    plural,
)
from diloco_tools.monitor.report import tables
from diloco_tools.monitor.report.curves import Curve
from diloco_tools.monitor.report.digest import STALEST
from diloco_tools.monitor.report.facts import OPEN, OVER, STOPPED, Facts

ENDINGS = {
    OVER: ("good", "The run is over"),
    STOPPED: ("quiet", "The broker has stopped"),
    OPEN: ("uneasy", "No end is recorded"),
}
PARTS = {
    "plots": "Curves",
    "presence": "Workers over time",
    "workers": "Workers",
    "rounds": "Rounds",
    "lives": "Broker",
    "warnings": "Warnings",
    "orders": "Operators",
    "settings": "Settings",
    "events": "Events",
}
MOST_IN_STRIP = 50  # workers over time
UPLOT = "web/assets/uplot"
SCRIPTS = ("web/assets/format.js", "web/assets/charts.js", "report/assets/report.js")
STYLES = ("web/assets/base.css", "report/assets/report.css")


def page_of(facts: Facts) -> str:
    """The report as HTML."""
    script, style = _script(), _style()
    return _template().render(
        facts=facts,
        policy=f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'",
        script=script,
        style=style,
        parts=PARTS,
        tone=ENDINGS[facts.ending][0],
        ending=ENDINGS[facts.ending][1],
        signs={"good": "●", "uneasy": "◐", "bad": "○", "quiet": "·"},
        levels=tables.LEVELS,
        headline=_headline(facts),
        remarks=_remarks(facts),
        tables=tables.tables(facts),
        settings=tables.settings(facts),
        changes=tables.changes(facts),
        staleness=[
            (f"over {STALEST}" if versions > STALEST else versions, contributions)
            for versions, contributions in facts.staleness
        ],
        in_strip=MOST_IN_STRIP,
        data=_data(facts),
    )


@cache
def _template() -> Template:
    made = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    made.globals |= {"moment": moment, "plural": plural}
    return made.from_string(_asset("report/assets/report.html"))


@cache
def _asset(name: str) -> str:
    return (files("diloco_tools.monitor") / name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    """The modules as one: what they import from each other stands above in the same script."""
    modules = "".join(map(_asset, SCRIPTS))
    modules = re.sub(r"(?m)^import .*\n|^export ", "", modules)
    library, licence = map(_asset, (f"{UPLOT}/uPlot.iife.min.js", f"{UPLOT}/LICENSE"))
    return f"/* {licence} */\n{library}\n{modules}"


@cache
def _style() -> str:
    return _asset(f"{UPLOT}/uPlot.min.css") + "".join(map(_asset, STYLES))


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _headline(facts: Facts) -> list[tuple[str, str]]:
    """What a reader in a hurry wants."""
    fragments = facts.settings.get("num_fragments")
    has_fragments = isinstance(fragments, int) and fragments > 1
    loss = f"{figure(facts.first_loss)} → {figure(facts.last_loss)}"
    if facts.best_loss_round is not None:
        loss += f", best {figure(facts.best_loss)} ({facts.best_loss_round:,})"
    size = facts.model.get("parameters")
    many = len(facts.workers) + facts.workers_left_out
    return [
        ("Mode", (facts.mode or NONE) + (f", {fragments} fragments" if has_fragments else "")),
        ("Model", f"{parameters(size)} parameters" if size else NONE),
        ("Began, UTC", moment(facts.began_at, "%d %b %Y %H:%M")),
        ("Lasted", clock(facts.ended_at - facts.began_at)),
        ("Pushes" if facts.mode == "async" else "Rounds", count(facts.rounds)),
        ("Loss", NONE if facts.first_loss is None else loss),
        ("Contributions", count(facts.contributions)),
        ("Workers", f"{many:,}, at most {facts.most_alive:,} at once"),
        ("Deaths", count(sum(worker.deaths for worker in facts.workers))),
        ("Traffic", f"{byte_size(facts.bytes_up)} up, {byte_size(facts.bytes_down)} down"),
        ("Broker", plural(len(facts.lives), "start")),
    ]


def _remarks(facts: Facts) -> list[str]:
    """What a reader has to know before the figures."""
    lines = list(facts.remarks)
    if not facts.rounds:
        lines.append("No round has closed in this history, so there are no curves.")
    if facts.ending == OPEN:
        lines.append(
            f"The history ends at {moment(facts.ended_at)} UTC without a last line: the broker was "
            "killed, its machine went down, or it is still running."
        )
    return lines


def _data(facts: Facts) -> dict[str, Any]:
    """What report.js draws."""
    away = [(one.ended_at, other.began_at) for one, other in pairwise(facts.lives)]
    workers = sorted(facts.workers[:MOST_IN_STRIP], key=lambda each: (each.first_seen, each.id))
    return {
        "began": facts.began_at,
        "ended": facts.ended_at,
        "away": away,
        "pauses": facts.pauses,
        "word": "push" if facts.mode == "async" else "round",
        "charts": _charts(facts, away),
        "workers": [
            {
                "id": worker.id,
                "spans": [(span.began_at, span.ended_at, span.state) for span in worker.spans],
                "active": worker.active,
                "marks": [(mark.at, mark.what, mark.text) for mark in worker.marks],
            }
            for worker in workers
        ],
    }


def _charts(facts: Facts, away: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    """Which curves there are. Each push of asynchronous mode makes a version, so its numbers are those
    of pushes. Workers are not shown one by one where there is only one, nor are their norms where
    these are of fragments in turn."""
    is_async = facts.mode == "async"

    def chart(plot: str, *keys: str, **words: Any) -> dict[str, Any]:
        is_time = plot in ("network", "speeds")
        curves = [(key, curve) for key in keys for curve in facts.curves.get(key, ())]
        lines = [
            {
                "name": key if len(keys) > 1 else curve.name,
                "points": _points(curve, away if is_time else (), is_time=is_time),
            }
            for key, curve in curves
            if curve.points
        ]
        return {"plot": plot, "lines": lines, **words}

    each = {"unit": "of each push"} if is_async else {}
    time = {"title": "Time between pushes", "unit": "from one version to the next"}
    found = [
        chart("loss", "loss", **each),
        chart("seconds", "seconds", **(time if is_async else {})),
        chart("norm", "norm", **each),
        chart("network", "network"),
    ]
    if not is_async:
        found.append(chart("workers", "averaged", "alive"))
    if len(facts.curves["loss of workers"]) > 1:
        words = {"id": "losses", "title": "Loss of each worker", "unit": ""}
        found.append(chart("loss", "loss of workers", **words))
    if len(facts.curves["norm of workers"]) > 1 and len(facts.curves["norm"]) == 1:
        words = {"id": "norms", "title": "Pseudo-gradient norm of each worker", "unit": ""}
        found.append(chart("norm", "norm of workers", **words))
    return [*found, chart("speeds", "speed of workers")]


def _points(
    curve: Curve, away: Sequence[tuple[float, float]], *, is_time: bool
) -> list[tuple[float, float | None]]:
    """Places and values, with a gap where there was no broker, or the worker was away."""
    gaps = sorted([*away, *curve.absent])
    found: list[tuple[float, float | None]] = []
    before = None
    for point in curve.points:
        place: float = point.at if is_time else point.number
        if before is not None:
            index = bisect_left(gaps, (before.at, before.at))
            if index < len(gaps) and gaps[index][1] <= point.at:
                found.append(((found[-1][0] + place) / 2, None))
        found.append((place, point.value))
        before = point
    return found
