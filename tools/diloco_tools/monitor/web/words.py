"""A snapshot in the words of the page, from the catalogue: header, rows of the server panel, the table.

The page words nothing of a snapshot by itself. It gets these words with each state, and again with each
pulse until the next snapshot, so that ages go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from diloco_protocol.feed import DEAD, Snapshot, Worker
from diloco_protocol.monitor.fields import (
    DASHBOARD,
    Field,
    Part,
    columns,
    has_round,
    run_name,
    state_of,
)
from diloco_protocol.monitor.rows import Listed, cells, rows_of
from diloco_protocol.monitor.tree import everyone
from diloco_protocol.quantities import NONE, byte_size, clock, duration, parameters, percent
from diloco_tools.monitor.feed.model import Freshness, listed
from diloco_tools.monitor.feed.series import Rate

# A column with a second field below its own: the page has room for ten columns.
BELOW = {"id": "host", "health": "state", "loss": "delta_norm", "rate_up": "rate_down"}
UNRECORDED_ROWS = {"rejected", "checkpoint", "standby"}  # a history says nothing of these
UNRECORDED_CELLS = {"health", "state", "beat_age_s"}
IN_HEADER = {"run", "state"}  # rows that the header has already

_FIELDS = {field.path: field for field in columns(DASHBOARD)}
COLUMNS = [field for path, field in _FIELDS.items() if path not in BELOW.values()]


def titles() -> list[dict[str, Any]]:
    """The columns of the table of workers."""
    return [
        {"key": field.path, "title": _title(field), "help": field.help or field.label}
        for field in COLUMNS
    ]


def _title(field: Field) -> str:
    """Of figures, both; what stands below a name needs no title."""
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
    """The words for a snapshot whose ages are those of this moment; `fresh` None: it is recorded."""
    is_recorded = fresh is None
    rows = {row.label: [*row.parts] for row in rows_of(snapshot, DASHBOARD)}
    if cpu is not None and "broker" in rows:
        rows["broker"].append(Part(f"{percent(cpu)} of a core"))
    hidden = IN_HEADER | (UNRECORDED_ROWS if is_recorded else set())
    return {
        "header": _header(snapshot),
        "counts": ", ".join(part.text for part in rows.get("workers", ())),
        "rows": [(label, parts) for label, parts in rows.items() if label not in hidden],
        "workers": _table(snapshot, fresh, rates),
    }


def _header(snapshot: Snapshot) -> Mapping[str, Any]:
    now, model, fragments = snapshot.round, snapshot.model, snapshot.fragments
    is_async = snapshot.mode == "async"
    number = NONE
    if is_async:
        number = str(max((each.version for each in fragments), default=0))
    elif now is not None and has_round(snapshot):
        number = str(now.number)
    arrived = expected = 0
    phase = ""
    if now is not None and has_round(snapshot):
        arrived, expected = len(now.arrived), len(now.expected)
        phase = f"{arrived}/{expected} arrived, {now.phase} for {duration(now.age_s)}"
    several = f", {len(fragments)} fragments" if len(fragments) > 1 else ""
    return {
        "run": f"run {run_name(snapshot)}" if snapshot.run else "no run yet",
        "mode": (snapshot.mode or NONE) + several,
        "condition": state_of(snapshot).text or NONE,
        "round-title": "Version" if is_async else "Round",
        "round": number,
        "round-more": phase,
        "uptime": clock(snapshot.uptime_s),
        "model": "not known yet"
        if model is None
        else f"{parameters(model.parameters)} parameters, {byte_size(model.bytes)}",
        "arrived": [arrived, expected],
    }


def _table(
    snapshot: Snapshot, fresh: Freshness | None, rates: Callable[[str], Rate | None]
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    path: list[str] = []
    for worker in everyone(snapshot.listed):
        path = [*path[: worker.level], worker.id]
        shown = listed(snapshot, worker, fresh, rates(worker.id))
        parts = cells(shown, DASHBOARD, indent="\u2003")  # spaces that no page folds
        found.append(
            {
                "id": worker.id,
                "path": path,
                "health": worker.health,
                "workers": worker.workers,
                "about": _about(worker, path),
                "cells": [_cell(field, parts, is_recorded=fresh is None) for field in COLUMNS],
                "sort": [_sort(field, shown) for field in COLUMNS],
            }
        )
    return found


def _cell(field: Field, parts: Mapping[str, Part], *, is_recorded: bool) -> tuple[str, str, str]:
    """Text, tone, and what stands below it."""

    def part(path: str) -> Part:
        return Part(NONE) if is_recorded and path in UNRECORDED_CELLS else parts[path]

    text, tone = part(field.path)
    below = part(BELOW[field.path]) if field.path in BELOW else Part("")
    return text, tone or below.tone, "" if below.text == NONE else below.text


def _sort(field: Field, listed: Listed) -> Any:
    """What a column is sorted by; None comes last."""
    worker = listed.worker
    if field.path == "health":
        return 0 if worker.health in ("lost", DEAD) else 2 if worker.health == "ok" else 1
    if field.path == "rate_up":
        return None if listed.up is None else listed.up + (listed.down or 0.0)
    if field.path == "inner_step":
        return (listed.inner_now or worker.inner_step) / (worker.sync_every or 1)
    return field.value(worker)


def _about(worker: Worker, path: list[str]) -> str:
    host = f" on {worker.host}" if worker.host else ""
    process = f", process {worker.pid}" if worker.pid else ""
    relays = f", downstream of {', '.join(path[:-1])}" if len(path) > 1 else ""
    return f"{worker.id}{host}{process}{relays}"
