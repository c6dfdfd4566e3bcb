"""The texts that the page shows of a snapshot: the page makes none by itself.

facts, rows   [label, [[text, tone], ...]] of the header and of the panel of the run
workers       rows of the table, in the columns of `titles`
events, rejections   the same as rows, the newest first
badge         how fresh the snapshot is: [tone, word, age]
notice        problems: [tone, word, sentences], or null
orders        actions that the broker can be asked for
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from diloco_protocol.feed import INSECURE, Snapshot, Worker
from diloco_protocol.monitor.fields import (
    BAD,
    DASHBOARD,
    GOOD,
    LEVELS,
    UNEASY,
    Field,
    Part,
    columns,
    run_name,
)
from diloco_protocol.monitor.rows import cells, rows_of, sort_key
from diloco_protocol.monitor.verdict import Verdict
from diloco_protocol.quantities import NONE, duration, percent, plural
from diloco_tools.monitor.feed.model import FeedModel, Freshness, listed
from diloco_tools.monitor.feed.series import Rate, RunSeries
from diloco_tools.monitor.orders import kick, orders

# Fields shown below another one: the page has room for ten columns.
BELOW = {"id": "host", "health": "state", "loss": "delta_norm", "rate_up": "rate_down"}
UNRECORDED_ROWS = {"rejected", "checkpoint", "standby"}  # a history does not contain these
UNRECORDED_CELLS = {"health", "state", "beat_age_s"}
HEADER = ("run", "state", "round", "pushes", "model")
MOST_REASONS = 7
_FIELDS = {field.path: field for field in columns(DASHBOARD)}
COLUMNS = [field for path, field in _FIELDS.items() if path not in BELOW.values()]


def titles() -> list[dict[str, Any]]:
    """The columns of the table of workers."""
    return [
        {"key": field.path, "title": _title(field), "help": field.help or field.label}
        for field in COLUMNS
    ]


def _title(field: Field) -> str:
    """For figures both titles; a field below a name needs none."""
    below = _FIELDS.get(BELOW.get(field.path, ""))
    if below is None or below.format == "text":
        return field.title
    return f"{field.title}, {below.title.lower()}"


def words(
    snapshot: Snapshot,
    fresh: Freshness | None,
    rates: Callable[[str], Rate | None],
    cpu: float | None = None,
) -> dict[str, Any]:
    """The texts for a snapshot whose ages are current; `fresh` is None for a recorded one."""
    rows = {row.label: [*row.parts] for row in rows_of(snapshot, DASHBOARD)}
    if cpu is not None and "broker" in rows:
        rows["broker"].append(Part(f"{percent(cpu)} of a core"))
    hidden = UNRECORDED_ROWS if fresh is None else set()
    shown = [(label, parts) for label, parts in rows.items() if label not in hidden]
    return {
        "run": f"run {run_name(snapshot)}" if snapshot.run else "no run yet",
        "facts": [(label.capitalize(), parts) for label, parts in shown if label in HEADER],
        "counts": ", ".join(part.text for part in rows.get("workers", ())),
        "rows": [(label.capitalize(), parts) for label, parts in shown if label not in HEADER],
        "workers": _table(snapshot, fresh, rates),
        "empty": "All workers have left." if snapshot.ended else "No workers yet.",
        "events": [
            logged(f"{duration(each.age_s)} ago", each.level, each.text)
            for each in sorted(snapshot.events, key=lambda each: -each.sequence)
        ],
        "rejections": [
            logged(f"{duration(r.age_s)} ago", "warning", f"{r.worker}: {r.code}: {r.text}")
            for r in snapshot.rejections
        ],
        "insecure": snapshot.security == INSECURE,
        "about": f"broker {snapshot.version}, incarnation {snapshot.epoch[:8]}",
    }


def logged(when: str, level: str, text: str) -> tuple[str, list[Part]]:
    """A line of the broker's log as a row."""
    tone = LEVELS.get(level, UNEASY)
    return when, ([Part(f"{level}: {text}", tone)] if tone else [Part(text)])


def live_words(
    model: FeedModel,
    series: RunSeries,
    verdict: Verdict,
    now: float,
    *,
    problem: str | None,
    address: str,
) -> dict[str, Any]:
    """The texts for a live feed: its newest snapshot, its freshness, and the possible orders."""
    fresh, snapshot = model.freshness(now), model.at(now)
    more = [problem] if problem and fresh is not Freshness.LIVE else []
    said: dict[str, Any] = dict.fromkeys(("facts", "rows", "workers", "events", "rejections"), ())
    silence = model.refusal or "No snapshot from the broker yet."
    if snapshot is not None:
        is_silent = fresh is Freshness.STALE
        age_s = 0.0 if is_silent else model.age_s(now)
        aged = replace(snapshot, uptime_s=snapshot.uptime_s + age_s)
        said = words(aged, fresh, series.rate_of, series.cpu)
        if not model.refusal:
            silence = "The broker is silent; nothing can be changed." if is_silent else ""
    elif not model.refusal:
        more.append(f"check that {address} is the feed of a running diloco-broker")
    age = duration(model.age_s(now)) if snapshot else "no snapshot yet"
    missed = [str(model.missed), plural(model.restarts, "restart") if model.restarts else ""]
    number = f" round {snapshot.round.number}" if snapshot and snapshot.round else ""
    return {
        **said,
        "facts": [*said["facts"], ("Missed snapshots", [Part(", ".join(filter(None, missed)))])],
        "badge": (fresh.value, fresh.name, age),
        "title": f"{fresh.name}{number}: DiLoCo",
        "notice": _notice(verdict, fresh, model.refusal, more),
        "silence": silence,
        "orders": {name: vars(order) for name, order in orders(snapshot).items()},
    }


def _notice(
    verdict: Verdict, fresh: Freshness, refusal: str, more: Sequence[str]
) -> tuple[str, str, list[str]] | None:
    said = [*verdict.first(MOST_REASONS), *more]
    word = "REFUSED" if refusal else verdict.word.upper()
    if fresh is Freshness.STALE and not refusal:
        word = fresh.name
    tone = BAD if word in ("REFUSED", "STALE") else GOOD if word == "ENDED" else UNEASY
    return (tone, word, said) if said else None


def _table(
    snapshot: Snapshot, fresh: Freshness | None, rates: Callable[[str], Rate | None]
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for worker in snapshot.listed:
        shown = listed(snapshot, worker, fresh, rates(worker.id))
        parts = cells(shown, DASHBOARD)
        found.append(
            {
                "id": worker.id,
                "about": _about(worker),
                "cells": [_cell(field, parts, is_recorded=fresh is None) for field in COLUMNS],
                "sort": [sort_key(field, shown) for field in COLUMNS],
                "order": vars(kick(worker, snapshot)),
            }
        )
    return found


def _cell(field: Field, parts: Mapping[str, Part], *, is_recorded: bool) -> tuple[str, str, str]:
    """Text, tone, and the text below it."""

    def part(path: str) -> Part:
        return Part(NONE) if is_recorded and path in UNRECORDED_CELLS else parts[path]

    text, tone = part(field.path)
    below = part(BELOW[field.path]) if field.path in BELOW else Part("")
    return text, tone or below.tone, "" if below.text == NONE else below.text


def _about(worker: Worker) -> str:
    host = f" on {worker.host}" if worker.host else ""
    process = f", process {worker.pid}" if worker.pid else ""
    via = f", via {worker.via}" if worker.via else ""
    return f"{worker.id}{host}{process}{via}"
