"""Formats a snapshot of the feed as the text of `diloco-broker status`."""

from collections.abc import Mapping, Sequence
from typing import Any

from diloco_protocol.feed import Worker, read_snapshot
from diloco_protocol.monitor.fields import STATUS, Field, Part, columns
from diloco_protocol.monitor.rows import Listed, cells, rows_of
from diloco_protocol.monitor.verdict import verdict_on
from diloco_protocol.quantities import NONE

REASONS = 5  # of a degraded run; the table has the others
LEAST_WORKERS = 3  # minimum lines of the table in a small window
LONGEST = {"id": 24, "host": 16, "via": 16}  # maximum column widths, characters


def as_text(data: Mapping[str, Any], room: int | None = None) -> str:
    """Format a snapshot as lines, in ASCII except for names.

    `room` is the maximum number of lines; healthy workers are omitted first.
    """
    snapshot = read_snapshot(data)
    verdict = verdict_on(snapshot)
    run, *rows = ((row.label, row.text) for row in rows_of(snapshot, STATUS))
    # For a run that waits or has ended, `state` has the reason.
    reasons = verdict.first(REASONS) if verdict.word == "degraded" else []
    judged = [("verdict", verdict.word.upper()), *(("", reason) for reason in reasons)]
    lines = [f"{label:<12}{text}" for label, text in (run, *judged, *rows)]
    if snapshot.listed:
        left = None if room is None else max(LEAST_WORKERS, room - len(lines) - 2)
        workers = sorted(snapshot.listed, key=lambda worker: worker.id)
        lines += ["", *_table(workers, left)]
    return "\n".join(lines).replace(NONE, "-")


def _table(workers: Sequence[Worker], most: int | None) -> list[str]:
    """A line for each worker, at most `most` lines; healthy workers are omitted first."""
    shown = workers
    if most is not None and len(shown) > most:
        first = {each.id for each in sorted(shown, key=lambda w: w.health == "ok")[: most - 1]}
        shown = [each for each in shown if each.id in first]
    rows = [cells(Listed(worker), STATUS) for worker in shown]
    filled = [each for each in columns(STATUS) if any(row[each.path].text for row in rows)]
    texts = [_column(field, rows) for field in filled]
    lines = ["  ".join(line).rstrip() for line in zip(*texts, strict=True)]
    if left := len(workers) - len(shown):
        lines.append(f"and {left} more; diloco-top and --json show all")
    return lines


def _column(field: Field, rows: Sequence[Mapping[str, Part]]) -> list[str]:
    """Its title and cells in equal width; text is aligned left, numbers right."""
    texts = [_clipped(row[field.path].text, LONGEST.get(field.path)) for row in rows]
    texts.insert(0, field.title.lower())
    width = max(map(len, texts))
    return [text.ljust(width) if field.format == "text" else text.rjust(width) for text in texts]


def _clipped(text: str, width: int | None) -> str:
    """Shorten a text in the middle, because names differ at either end."""
    if width is None or len(text) <= width:
        return text
    head = width // 2 - 1
    return f"{text[:head]}..{text[head + 2 - width :]}"
