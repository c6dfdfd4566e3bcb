"""Predictions compared with the measurements of `make lan`: one row for each, with its error."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from diloco_protocol.errors import UsageError
from diloco_protocol.quantities import parameters
from diloco_tools.plan.answer import Answer, answer
from diloco_tools.plan.quantities import of_bits
from diloco_tools.plan.question import Question
from diloco_tools.plan.simulated.costs import Costs

MOST_ERROR = 0.15
KINDS = ("round", "streaming")
PIECES = 16  # of a fragment: there are dozens of rows


@dataclass(frozen=True)
class Row:
    """One measurement. Seconds are those that training waits in a cycle of H steps.

    Attributes:
        measured: the median; least and most over the repeats.
        predicted: simulated.
        whole: seconds of a sync without overlap. Errors are relative to it: streaming leaves so little
            waiting that a relative error of that would be meaningless.
    """

    question: Question
    kind: str
    measured: float
    least: float
    most: float
    predicted: float
    whole: float

    @property
    def error(self) -> float:
        return (self.predicted - self.measured) / self.whole

    @property
    def is_met(self) -> bool:
        return abs(self.error) <= MOST_ERROR


def question_of(measurement: Mapping[str, Any], cores: int | None) -> Question | None:
    """The question of a measurement; None if it is of a kind that is not simulated."""
    m = measurement
    mode = m.get("mode") or "sync"
    if m["kind"] not in KINDS or m.get("quorum") is not None:
        return None
    streams = m["kind"] == "streaming"
    return Question(
        parameters=m["parameters"],
        workers=m["workers"],
        broker_link=m["broker_bits_per_s"],
        links=tuple(m["worker_bits_per_s"]),
        delays=(m["round_trip_s"],),
        step_s=m["step_s"] or 1.0,
        sync_every=m["sync_every"] or 1,
        fragments=m["fragments"],
        delay_steps=None if streams else 0,  # None: replies are merged on arrival
        wire_dtype=m["wire_dtype"],
        reply_dtype=m["reply_dtype"],
        mode=mode,
        cores=cores,
    )


def rows(recorded: Mapping[str, Any], costs: Costs | None = None) -> list[Row]:
    """Each measurement that can be simulated, with its prediction."""
    cores = recorded["machine"].get("cores")
    found = []
    for measurement in recorded["measurements"]:
        question = question_of(measurement, cores)
        if question is not None:
            found.append(_row(measurement, question, answer(question, costs, PIECES)))
    return found


def _row(measurement: Mapping[str, Any], question: Question, found: Answer) -> Row:
    seconds: Sequence[float] = measurement["seconds"]
    middle = median(seconds)
    whole = measurement.get("sync_seconds") or middle
    return Row(
        question,
        str(measurement["kind"]),
        middle,
        min(seconds),
        max(seconds),
        found.waits_s,
        whole,
    )


def read(path: Path) -> dict[str, Any]:
    """Read the measurements. Raises UsageError."""
    try:
        recorded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = recorded["machine"], recorded["measurements"][0]["seconds"][0]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. make lan writes it.") from None
    except (ValueError, LookupError, TypeError):
        raise UsageError(f"{path} contains no measurements. make lan writes them.") from None
    return recorded


HEAD = ("parameters", "workers", "lines", "codecs", "measured", "predicted", "error")


def cells(row: Row) -> tuple[str, ...]:
    """The cells of a row."""
    question = row.question
    many = len(set(question.links)) > 1
    links = ", ".join(of_bits(each) for each in question.links) if many else ""
    spread = f" ({row.least:.3g} to {row.most:.3g})" if row.most > row.least else ""
    streams = f", P = {question.fragments}" if row.kind == "streaming" else ""
    verdict = "" if row.is_met else ", not met"
    return (
        parameters(question.parameters),
        str(question.workers),
        of_bits(question.broker_link) + (f" ({links})" if links else ""),
        f"{question.wire_dtype}/{question.reply_dtype}{streams}",
        f"{row.measured:.3g} s{spread}",
        f"{row.predicted:.3g} s",
        f"{row.error:+.0%}{verdict}",
    )


def summary(found: Sequence[Row]) -> str:
    """The number of rows within the bound, as a sentence."""
    met = sum(row.is_met for row in found)
    return (
        f"{met} of {len(found)} predictions are within {MOST_ERROR:.0%} of the measurement; the "
        f"median error is {median(abs(row.error) for row in found):.0%}."
    )


def as_table(found: Sequence[Row]) -> Table:
    """For the terminal."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in HEAD:
        table.add_column(name, header_style="dim")
    for row in found:
        style = "" if row.is_met else "yellow"
        table.add_row(*(Text(cell, style) for cell in cells(row)))
    return table


def as_plain(found: Sequence[Row]) -> dict[str, Any]:
    """For JSON: seconds, and errors as shares."""
    return {
        "text": summary(found),
        "within": MOST_ERROR,
        "rows": [
            {
                "kind": row.kind,
                "question": asdict(row.question),
                "measured_s": row.measured,
                "predicted_s": row.predicted,
                "whole_s": row.whole,
                "error": row.error,
                "is_within": row.is_met,
            }
            for row in found
        ],
    }


def as_markdown(found: Sequence[Row]) -> str:
    """For the page: the summary, and the rows beyond the bound."""
    lines = ["| " + " | ".join(HEAD) + " |", "| " + " | ".join("---" for _ in HEAD) + " |"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in found if not row.is_met]
    return "\n".join([summary(found), *(["", *lines] if len(lines) > 2 else [])])


BLOCK = re.compile(r"<!-- validation -->\n.*?<!-- end -->", re.DOTALL)


def filled(page: str, found: Sequence[Row], recorded: Mapping[str, Any]) -> str:
    """`docs/performance.md` with these rows between its marks. Raises UsageError if it has no marks."""
    if BLOCK.search(page) is None:
        raise UsageError("The page lacks the marks <!-- validation --> and <!-- end -->.")
    machine = recorded["machine"]
    where = (
        f"Measured on {machine.get('cores')} cores ({machine.get('processor')}); the load is below, and "
        "the planner assumes none."
    )
    block = f"<!-- validation -->\n{where}\n\n{as_markdown(found)}\n<!-- end -->"
    return BLOCK.sub(lambda _: block, page)


def write_page(path: Path, found: Sequence[Row], recorded: Mapping[str, Any]) -> None:
    """Write the rows into the page. Raises UsageError and leaves the page unchanged."""
    try:
        page = path.read_text(encoding="utf-8")
        path.write_text(filled(page, found, recorded), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
