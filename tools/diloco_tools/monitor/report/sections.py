"""The parts of the page, each a pure function from facts to markup."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from diloco_tools.monitor.report.drawing.axes import TimeAxis
from diloco_tools.monitor.report.drawing.markup import Html, joined, tag
from diloco_tools.monitor.report.drawing.strip import WORDS, presence
from diloco_tools.monitor.report.drawing.wording import (
    clock,
    duration,
    figure,
    moment,
    norm,
    plural,
    quantity,
    setting,
    size,
)
from diloco_tools.monitor.report.facts import Facts, Life, Worker
from diloco_tools.monitor.report.settings import rows_of, title_of

MOST_ROWS = 200  # of a table
SIGNS = {"good": "●", "uneasy": "◐", "bad": "○", "quiet": "·"}
LEVELS = {"info": "quiet", "warning": "uneasy", "error": "bad"}


def panel(name: str, title: str, *parts: str, note: str = "") -> Html:
    head = tag("div", tag("h2", title), tag("p", note, class_="dim"), class_="head")
    return tag("section", head, *parts, class_="panel", id=name)


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int = 1,
    wide: Collection[str] = (),
) -> Html:
    """A table whose first `left` columns are texts. Where each line becomes a card, on a phone, each
    cell shows its column's name, and those of `wide` columns have a line of their own."""
    kinds = [
        " ".join(["left"] * (place < left) + ["wide"] * (name in wide)) or None
        for place, name in enumerate(columns)
    ]
    heads = [
        tag("th", name, scope="col", class_=kind) for name, kind in zip(columns, kinds, strict=True)
    ]
    lines = [
        tag(
            "tr",
            *(
                tag("td", cell, data_label=name, class_=kind)
                for name, kind, cell in zip(columns, kinds, row, strict=True)
            ),
        )
        for row in rows
    ]
    whole = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *lines))
    return tag("div", whole, class_="scroll")


def toned(tone: str, text: str) -> Html:
    """A word with its colour and its sign."""
    sign = tag("span", SIGNS[tone], aria_hidden="true")
    return tag("span", sign, f" {text}", data_tone=tone, class_="toned")


def workers_over_time(facts: Facts, axis: TimeAxis) -> Html:
    note = "times are UTC, by the broker's clock"
    return panel(
        "presence", "Workers over time", presence(facts.workers, axis, facts.pauses), note=note
    )


def worker_table(facts: Facts) -> Html:
    is_async = facts.mode == "async"
    columns = ("Worker", "At the end", "Here", "Pushes" if is_async else "In rounds")
    more = ("Steps/s", "Loss", "Norm", "Staleness", "Sent", "Received", "Deaths", "Returns")
    rows = [_worker_row(each, is_async) for each in facts.workers[:MOST_ROWS]]
    parts = [table((*columns, *more), rows, 2, ("Worker", "At the end"))] if rows else []
    if not rows:
        parts = [tag("p", "No worker has joined.", class_="empty")]
    left_out = len(facts.workers) - len(rows) + facts.workers_left_out
    if left_out:
        parts.append(tag("p", f"{plural(left_out, 'more worker')} not shown.", class_="dim"))
    note = "losses and norms: the last; speeds: the median"
    return panel("workers", "Workers", *parts, note=note)


def _worker_row(worker: Worker, is_async: bool) -> list[str]:
    hosts = ", ".join(worker.hosts)
    if worker.behind is not None:
        hosts = f"relay of {plural(worker.behind, 'worker')}" + (f", {hosts}" if hosts else "")
    if worker.restarts:
        hosts += f"{', ' * bool(hosts)}{plural(worker.restarts + 1, 'id')} in turn"
    name = [tag("b", worker.id, class_="main"), tag("span", hosts, class_="more")]
    tones = {"here": "good", "died": "bad", "left": "quiet"}
    of = f"{worker.contributions:,}"
    if not is_async:
        of += f" of {worker.rounds_here:,}"
    stale = figure_of_staleness(worker)
    return [
        joined(name),
        toned(tones.get(worker.ended, "uneasy"), WORDS.get(worker.ended, worker.ended)),
        duration(worker.here_s),
        of,
        quantity(worker.steps_per_s),
        figure(worker.loss),
        norm(worker.delta_norm),
        stale,
        size(worker.bytes_up),
        size(worker.bytes_down),
        f"{worker.deaths:,}",
        f"{worker.returns:,}",
    ]


def figure_of_staleness(worker: Worker) -> str:
    if worker.staleness_mean is None or worker.staleness_most is None:
        return "—"
    if not worker.staleness_most:
        return "0"
    return f"{worker.staleness_mean:.2f}, at most {worker.staleness_most}"


def slow_rounds(facts: Facts) -> Html:
    if not facts.slowest:
        return panel("rounds", "Rounds", tag("p", "No round has closed.", class_="empty"))
    title = "Longest times between pushes" if facts.mode == "async" else "Slowest rounds"
    half = f"half of them within {duration(facts.round_median_s)}"
    note = f"{half}, 95% within {duration(facts.round_p95_s)}"
    has_fragments = any(each.fragment for each in facts.slowest)
    columns = [
        "Push" if facts.mode == "async" else "Round",
        "Closed, UTC",
        "Took",
        "Averaged",
        "Without",
    ]
    rows = []
    for each in facts.slowest:
        of = "" if each.expected is None else f" of {each.expected}"
        which = f"{each.number:,}" + (f" (fragment {each.fragment})" if has_fragments else "")
        cells = [which, moment(each.at), duration(each.seconds), f"{each.averaged}{of}"]
        rows.append([*cells, each.without or "—"])
    return panel("rounds", title, table(columns, rows, left=2), note=note)


def lives(facts: Facts) -> Html:
    columns = ("Began, UTC", "How it ended", "For", "Rounds", "Up", "Down", "CPU", "Memory")
    rows = [
        [
            moment(life.began_at),
            life_ending(life, is_last=place == len(facts.lives) - 1),
            clock(life.ended_at - life.began_at),
            "—" if life.first is None else f"{life.first:,} to {life.last:,}",
            size(life.bytes_up),
            size(life.bytes_down),
            duration(life.cpu_s),
            size(life.rss_bytes),
        ]
        for place, life in enumerate(facts.lives)
    ]
    note = "each start of the broker; CPU and memory are the broker's"
    return panel(
        "lives",
        "Lives of the broker",
        table(columns, rows[:MOST_ROWS], 2, ("How it ended",)),
        note=note,
    )


def life_ending(life: Life, *, is_last: bool) -> Html:
    if life.ending is not None:
        words = "the run is over" if life.is_over else "stopped"
        return toned("good" if life.is_over else "quiet", f"{words}: {life.ending}")
    if is_last:
        return toned("uneasy", "no last line: it was killed, or is still running")
    return toned("bad", "no last line: it was killed, or its machine went down")


def said(facts: Facts) -> Html:
    if not facts.said:
        none = tag("p", "The broker has warned of nothing.", class_="empty")
        return panel("warnings", "Warnings and errors", none)
    rows = [
        [
            toned(LEVELS.get(each.level, "uneasy"), each.level),
            each.text,
            f"{each.count:,}",
            moment(each.last_at),
        ]
        for each in facts.said[:MOST_ROWS]
    ]
    note = (
        f"{plural(facts.warnings, 'warning')}, {plural(facts.errors, 'error')}; alike ones are one"
    )
    what = "What the broker said last"
    columns = ("Level", what, "Times", "Last, UTC")
    return panel("warnings", "Warnings and errors", table(columns, rows, 2, (what,)), note=note)


def orders(facts: Facts) -> Html:
    if not facts.actions:
        none = tag("p", "Nobody has steered the run.", class_="empty")
        return panel("orders", "What operators did", none)
    rows = [
        [
            moment(each.at),
            each.text,
            each.who + ("" if each.is_proven else " (unproven)"),
            "—" if each.round is None else f"{each.round:,}",
        ]
        for each in facts.actions[-MOST_ROWS:]
    ]
    left_out = facts.actions_left_out + len(facts.actions) - len(rows)
    note = f"{left_out:,} older ones are not shown" if left_out else ""
    columns = ("When, UTC", "What", "Who", "In round")
    return panel("orders", "What operators did", table(columns, rows, 3, ("What",)), note=note)


def settings(facts: Facts) -> Html:
    rows = [
        tag("div", tag("dt", name), tag("dd", value)) for name, value in rows_of(facts.settings)
    ]
    parts = [tag("dl", *rows, class_="metrics")]
    if not rows:
        parts = [tag("p", "The history does not say how the run was set up.", class_="empty")]
    if facts.changes:
        changes = [
            [
                moment(each.at),
                title_of(each.name),
                f"{setting(each.before)} → {setting(each.after)}",
                "options of a new start" if each.by_restart else "set in the run",
            ]
            for each in facts.changes[-MOST_ROWS:]
        ]
        columns = ("When, UTC", "Setting", "Change", "By")
        parts += [tag("h3", "Changes"), table(columns, changes, 4, ("Setting",))]
    return panel("settings", "Settings", *parts, note="as they were at the end")


def events(facts: Facts) -> Html:
    if not facts.events:
        none = tag("p", "Nothing has happened yet.", class_="empty")
        return panel("events", "Events", none)
    lines = [
        tag(
            "li",
            tag("span", moment(each.at, "%d %b %H:%M:%S"), class_="age"),
            tag("span", *_with_level(each.level), each.text),
        )
        for each in facts.events
    ]
    summary = tag("summary", f"The newest {plural(len(lines), 'event')}, those of rounds left out")
    note = f"{facts.events_left_out:,} older ones are not shown" if facts.events_left_out else ""
    listed = tag("ol", *lines, class_="log")
    return panel("events", "Events", tag("details", summary, listed), note=note)


def _with_level(level: str) -> list[Html]:
    if level == "info":
        return []
    return [tag("span", f"{level}: ", class_="level", data_tone=LEVELS.get(level, "uneasy"))]
