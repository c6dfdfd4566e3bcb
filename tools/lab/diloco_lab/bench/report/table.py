"""The tables that end a benchmark: one for each part, then the targets."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from diloco_lab.bench.report.figures import RATIOS, TARGETS, Figure, Report, number, show

# Spreads of fewer values than this say nothing.
LEAST_VALUES = 3


def tables(report: Report) -> list[Table]:
    """One for each part in its order, then the targets; none of them is empty."""
    found = [
        _part_table(part, report.of_part(part))
        for part in dict.fromkeys(each.part for each in report.figures)
    ]
    return [*found, _targets_table(report)] if report.verdicts else found


def _table(title: str, of: str, columns: Sequence[str]) -> Table:
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column(of, no_wrap=True)
    for name in columns:
        shown.add_column(name, justify="right", no_wrap=True)
    return shown


def _part_table(part: str, figures: Sequence[Figure]) -> Table:
    """What it was measured on in rows, what was measured in columns; medians with their spreads."""
    columns = dict.fromkeys((each.name, each.unit) for each in figures)
    cells = {(each.of, each.name): _cell(each) for each in figures}
    heads = [name if unit in RATIOS else f"{name}\n{unit}" for name, unit in columns]
    shown = _table(part, "", heads)
    for row in dict.fromkeys(each.of for each in figures):
        shown.add_row(row, *(cells.get((row, name), "") for name, _ in columns))
    return shown


def _cell(figure: Figure) -> Text:
    text, spread = number(figure.median, figure.unit), _spread(figure)
    return Text.assemble(text, " ", (spread, "dim")) if spread else Text(text)


def _spread(figure: Figure) -> str:
    if len(figure.values) < LEAST_VALUES:
        return ""
    return f"{number(figure.low, figure.unit)}-{number(figure.high, figure.unit)}"


def _targets_table(report: Report) -> Table:
    """Of all figures that a target applies to, the worst counts."""
    what = "what, and on what the worst was measured"
    shown = _table("targets", what, ["asked", "worst", "spread"])
    shown.add_column("", no_wrap=True)
    for key, found in report.verdicts.items():
        shown.add_row(
            Text.assemble(TARGETS[key].name, "  ", (found.of, "dim")),
            str(TARGETS[key]),
            show(found.median, found.unit),
            _spread(found),
            Text("met", "green") if found.is_met else Text("NOT MET", "bold red"),
        )
    return shown


def sentences(report: Report) -> list[str]:
    """What has to be said below the tables."""
    told = list(report.skipped)
    if not report.verdicts:
        told.append("Nothing that was measured here has a target.")
    elif absent := [each.name for key, each in TARGETS.items() if key not in report.verdicts]:
        told.append(f"Not measured here: {'; '.join(absent)}.")
    return [*told, NOTE]


NOTE = (
    "Each figure is a median, with the least and the greatest value behind it. Ratios to raw TCP are of "
    "measurements in turn, so they hold where absolute figures drift; see tools/lab/BENCHMARK.md."
)
