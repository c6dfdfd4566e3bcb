"""The tables of a report: which columns, in which words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from diloco_protocol.monitor.fields import SETTINGS
from diloco_protocol.quantities import (
    FORMATS,
    NONE,
    byte_size,
    clock,
    count,
    duration,
    figure,
    moment,
    norm,
    plural,
    scaled,
    setting,
)
from diloco_tools.monitor.report.facts import Facts, Life
from diloco_tools.monitor.report.workers import Worker

MOST_ROWS = 200
LEVELS = {"info": "quiet", "warning": "uneasy", "error": "bad"}
ENDED = {
    "here": ("good", "here at the end"),
    "away": ("uneasy", "did not come back after a restart of the broker"),
    "left": ("quiet", "left"),
    "died": ("bad", "counted as dead"),
    "kicked": ("uneasy", "removed by an operator"),
    "revoked": ("uneasy", "its key was revoked"),
}


class Cell(NamedTuple):
    """What a cell says: `more` in small letters below, `tone` as a colour and a sign."""

    text: str
    more: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """A section with a table: its first `left` columns are texts, and `wide` may be long."""

    id: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str | Cell, ...]]
    left: int = 1
    wide: str = ""
    note: str = ""
    empty: str = ""


def tables(facts: Facts) -> list[Table]:
    return [_workers(facts), _rounds(facts), _lives(facts), _said(facts), _actions(facts)]


def _workers(facts: Facts) -> Table:
    is_async = facts.mode == "async"
    columns = ("Worker", "At the end", "Here", "Pushes" if is_async else "In rounds", "Steps/s")
    more = ("Loss", "Norm", "Staleness", "Sent", "Received", "Deaths", "Returns")
    rows = [_worker(each, is_async) for each in facts.workers[:MOST_ROWS]]
    left_out = len(facts.workers) - len(rows) + facts.workers_left_out
    note = "losses and norms: the last; speeds: the median"
    note += f"; {plural(left_out, 'more worker')} not shown" if left_out else ""
    empty = "No worker has joined."
    return Table("workers", "Workers", (*columns, *more), rows, 2, "At the end", note, empty)


def _worker(worker: Worker, is_async: bool) -> tuple[str | Cell, ...]:
    where = ", ".join(worker.hosts)
    if worker.behind is not None:
        where = f"relay of {plural(worker.behind, 'worker')}" + (f", {where}" if where else "")
    if worker.restarts:
        where += f"{', ' * bool(where)}{plural(worker.restarts + 1, 'id')} in turn"
    tone, word = ENDED.get(worker.ended, ("uneasy", worker.ended or "never here"))
    of = "" if is_async else f" of {count(worker.rounds_here)}"
    mean, most = worker.staleness_mean, worker.staleness_most
    stale = NONE if mean is None else f"{mean:.2f}, at most {most}" if most else "0"
    return (
        Cell(worker.id, where),
        Cell(word, tone=tone),
        duration(worker.here_s),
        f"{count(worker.contributions)}{of}",
        scaled(worker.steps_per_s),
        figure(worker.loss),
        norm(worker.delta_norm),
        stale,
        byte_size(worker.bytes_up),
        byte_size(worker.bytes_down),
        count(worker.deaths),
        count(worker.returns),
    )


def _rounds(facts: Facts) -> Table:
    is_async = facts.mode == "async"
    has_fragments = any(each.fragment for each in facts.slowest)
    half, most = duration(facts.round_median_s), duration(facts.round_p95_s)
    rows: list[tuple[str | Cell, ...]] = []
    for each in facts.slowest:
        which = f"{each.number:,}" + (f" (fragment {each.fragment})" if has_fragments else "")
        of = "" if each.expected is None else f" of {each.expected}"
        took, averaged = duration(each.seconds), f"{each.averaged}{of}"
        rows.append((which, moment(each.at), took, averaged, each.without or NONE))
    return Table(
        "rounds",
        "Longest times between pushes" if is_async else "Slowest rounds",
        ("Push" if is_async else "Round", "Closed, UTC", "Took", "Averaged", "Without"),
        rows,
        2,
        note=f"half of them within {half}, 95% within {most}" if rows else "",
        empty="No round has closed.",
    )


def _lives(facts: Facts) -> Table:
    rows: list[tuple[str | Cell, ...]] = [
        (
            moment(life.began_at),
            _ending(life, is_last=life is facts.lives[-1]),
            clock(life.ended_at - life.began_at),
            NONE if life.first is None else f"{life.first:,} to {life.last:,}",
            byte_size(life.bytes_up),
            byte_size(life.bytes_down),
            duration(life.cpu_s),
            byte_size(life.rss_bytes),
        )
        for life in facts.lives[:MOST_ROWS]
    ]
    columns = ("Began, UTC", "How it ended", "For", "Rounds", "Up", "Down", "CPU", "Memory")
    note = "CPU and memory are those of the broker"
    return Table("lives", "Starts of the broker", columns, rows, 2, "How it ended", note)


def _ending(life: Life, *, is_last: bool) -> Cell:
    if life.ending is not None:
        words, tone = ("the run is over", "good") if life.is_over else ("stopped", "quiet")
        return Cell(f"{words}: {life.ending}", tone=tone)
    if is_last:
        return Cell("no last line: it was killed, or is still running", tone="uneasy")
    return Cell("no last line: it was killed, or its machine went down", tone="bad")


def _said(facts: Facts) -> Table:
    rows: list[tuple[str | Cell, ...]] = [
        (Cell(s.level, tone=LEVELS[s.level]), s.text, count(s.count), moment(s.last_at))
        for s in facts.said
    ]
    note = (
        f"{plural(facts.warnings, 'warning')}, {plural(facts.errors, 'error')}; those that differ "
    )
    note = f"{note}in numbers alone are one" if rows else ""
    columns = ("Level", "What the broker logged last", "Times", "Last, UTC")
    title, empty = "Warnings and errors", "No warnings."
    return Table("warnings", title, columns, rows, 2, columns[1], note, empty)


def _actions(facts: Facts) -> Table:
    rows: list[tuple[str | Cell, ...]] = [
        (
            moment(each.at),
            each.text,
            each.who + ("" if each.is_proven else " (unproven)"),
            count(each.round),
        )
        for each in facts.actions[-MOST_ROWS:]
    ]
    left_out = facts.actions_left_out + len(facts.actions) - len(rows)
    note = f"{left_out:,} older ones are not shown" if left_out else ""
    columns, empty = ("When, UTC", "What", "Who", "In round"), "No operator actions."
    return Table("orders", "Operator actions", columns, rows, 3, "What", note, empty)


def changes(facts: Facts) -> Table:
    rows: list[tuple[str | Cell, ...]] = [
        (
            moment(each.at),
            title_of(each.name),
            f"{_value(each.name, each.before)} → {_value(each.name, each.after)}",
            "options of a new start" if each.by_restart else "set in the run",
        )
        for each in facts.changes[-MOST_ROWS:]
    ]
    return Table("changes", "Changes", ("When, UTC", "Setting", "Change", "By"), rows, 4, "Setting")


def title_of(path: str) -> str:
    """A setting in words; one that the catalogue does not have keeps its name."""
    field = SETTINGS.get(path)
    return path if field is None else field.label[:1].upper() + field.label[1:]


def _value(path: str, value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (
        FORMATS[SETTINGS[path].format](value) if is_number and path in SETTINGS else setting(value)
    )


def settings(facts: Facts) -> list[tuple[str, str]]:
    """Titles and values of the settings that are set, those of the catalogue first."""
    one_fragment = facts.settings.get("num_fragments") in (None, 1)
    names = [*filter(facts.settings.__contains__, SETTINGS), *sorted(facts.settings)]
    return [
        (title_of(name), _value(name, facts.settings[name]))
        for name in dict.fromkeys(names)
        if facts.settings[name] not in (None, "[]")
        and not (one_fragment and name.startswith("fragment_"))
    ]
