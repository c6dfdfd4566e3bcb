"""The tables that end a benchmark: one for each part, then the targets."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from diloco_tools.bench.report.figures import RATIOS, TARGETS, Figure, Report, number, show, worst

# Spreads of fewer values than this say nothing.
LEAST_VALUES = 3


def tables(report: Report) -> list[Table]:
    """A table for each part: what it was measured on in rows, what was measured in columns."""
    return [_part_table(part, report.of_part(part)) for part in report.parts]


def _part_table(part: str, figures: Sequence[Figure]) -> Table:
    """Cells: the median, and behind it the least and the greatest value."""
    rows = list(dict.fromkeys(each.of for each in figures))
    columns = dict.fromkeys((each.name, each.unit) for each in figures)
    cells = {(each.of, each.name): each for each in figures}
    shown = Table(title=part, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("", no_wrap=True)
    for name, unit in columns:
        shown.add_column(
            name if unit in RATIOS else f"{name}\n{unit}", justify="right", no_wrap=True
        )
    for row in rows:
        shown.add_row(row, *(_cell(cells.get((row, name))) for name, _ in columns))
    return shown


def _cell(figure: Figure | None) -> Text:
    if figure is None:
        return Text()
    text = number(figure.median, figure.unit)
    spread = _spread(figure)
    return Text.assemble(text, " ", (spread, "dim")) if spread else Text(text)


def _spread(figure: Figure) -> str:
    if len(figure.values) < LEAST_VALUES:
        return ""
    return f"{number(figure.low, figure.unit)}-{number(figure.high, figure.unit)}"


def targets_table(report: Report) -> Table:
    """Targets that were measured: of all figures that one applies to, the worst counts."""
    shown = Table(title="targets", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("what, and on what the worst was measured", no_wrap=True)
    for name in ("asked", "worst", "spread"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("", no_wrap=True)
    for key, target in TARGETS.items():
        found = worst(report.figures, key)
        if found is not None:
            shown.add_row(
                Text.assemble(target.name, "  ", (found.of, "dim")),
                str(target),
                show(found.median, found.unit),
                _spread(found),
                Text("met", "green") if found.is_met else Text("NOT MET", "bold red"),
            )
    return shown


def sentences(report: Report) -> list[str]:
    """What has to be said below the tables."""
    absent = [t.name for key, t in TARGETS.items() if worst(report.figures, key) is None]
    told = list(report.skipped)
    if len(absent) == len(TARGETS):
        told.append("Nothing that was measured here has a target.")
    elif absent:
        told.append(f"Not measured here: {'; '.join(absent)}.")
    return [*told, NOTE]


NOTE = (
    "Each figure is a median, with the least and the greatest value behind it. Ratios to raw TCP are of "
    "measurements in turn, so they hold where absolute figures drift; see tools/BENCHMARK.md."
)
