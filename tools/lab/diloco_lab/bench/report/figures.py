"""The results of a benchmark: figures with their spread, and targets to compare them with. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

FORMAT = 1  # of the JSON file; keys may be added without a new one


class Target(NamedTuple):
    """What a figure should be."""

    name: str  # what is asked, as the table has it
    limit: float  # in the figure's unit
    at_least: bool  # the figure should not be below the limit; else not above
    unit: str  # of the figures that it applies to

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {show(self.limit, self.unit)}"


TARGETS: Mapping[str, Target] = {
    "fold": Target("transport with fold / raw TCP", 0.80, True, "x"),
    "round": Target("whole round, in + out / raw TCP", 0.60, True, "x"),
    "broker memory": Target("broker peak beyond its state, 2 workers", 64, False, "MB"),
    "broker growth": Target("broker peak, more for each worker", 8, False, "MB"),
    "worker memory": Target("worker memory / fp32 parameters", 2.6, False, "x"),
    "heartbeat": Target("heartbeat p99 during a round", 20, False, "ms"),
    "turn": Target("longest turn of the loop, thread CPU", 5, False, "ms"),
    "blocked": Target("training blocked beyond the copy, tau 2", 0.02, False, "%"),
    "idle": Target("500 idle workers, of a core", 0.10, False, "%"),
    "cpu": Target("broker CPU per GB, whole round / raw TCP", 2.0, False, "x"),
    "cpu transport": Target("CPU per GB, transport alone / raw TCP", 1.4, False, "x"),
    "link": Target("share of a 1 Gb/s link, 100 ms", 0.80, True, "%"),
    "tensor threads": Target("64 chunks with two threads, times as fast", 1.6, True, "x"),
    "int4z loopback": Target("int4z / bf16/fp32, round on loopback", 1.15, False, "x"),
    "int4z 1 Gb/s": Target("int4z / bf16/fp32, round at 1 Gb/s", 0.12, False, "x"),
    "int4z 10 Gb/s": Target("int4z / bf16/fp32, computed at 10 Gb/s", 0.50, False, "x"),
    "attached": Target("step with the hook attached / without", 1.01, False, "times"),
}

# Digits behind the point, by unit. A share is kept as a fraction and shown in percent.
_DIGITS = {
    "x": 2,
    "times": 3,
    "GB/s": 2,
    "s": 3,
    "ms": 1,
    "MB": 0,
    "/s": 1,
    "%": 1,
    "s/GB": 2,
    "bits": 2,
}
RATIOS = ("x", "times")  # shown without a unit


def show(value: float, unit: str) -> str:
    """A value with its unit."""
    if unit == "%":
        return f"{number(value, unit)}%"
    return number(value, unit) if unit in RATIOS else f"{number(value, unit)} {unit}"


def number(value: float, unit: str) -> str:
    """A value without its unit, which stands elsewhere."""
    return f"{100 * value if unit == '%' else value:.{_DIGITS[unit]}f}"


@dataclass(frozen=True)
class Figure:
    """Something that was measured, several times where it could be."""

    part: str  # of the benchmark
    of: str  # what it was measured on; rows of a table
    name: str  # what was measured; columns of a table
    values: tuple[float, ...]  # in the order in which they were measured
    unit: (
        str  # x (a ratio), times (one near 1), GB/s, s, ms, MB, /s, s/GB, bits, or % for a fraction
    )
    target: str | None = None  # key in `TARGETS`
    note: str = ""  # what else one should know

    def __post_init__(self) -> None:
        has_other_target = self.target is not None and TARGETS[self.target].unit != self.unit
        if not self.values or self.unit not in _DIGITS or has_other_target:
            raise ValueError(f"no values, an unknown unit, or a target in another: {self}")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def is_met(self) -> bool | None:
        """Whether the median is within the target; None without one."""
        return None if self.target is None else TARGETS[self.target].is_met(self.median)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        plain = asdict(self) | {"median": self.median, "low": self.low, "high": self.high}
        if self.target is not None:
            target = TARGETS[self.target]
            plain["target"] = {"name": target.name, "words": str(target), "met": self.is_met}
        return plain


def figure(
    part: str,
    of: str,
    name: str,
    values: Iterable[float] | float,
    unit: str,
    *,
    target: str | None = None,
    note: str = "",
) -> Figure:
    """A figure of one value or of several."""
    several = (values,) if isinstance(values, int | float) else tuple(values)
    return Figure(part, of, name, several, unit, target=target, note=note)


# What is measured, by name.
Parts = dict[str, Callable[..., list[Figure]]]


@dataclass(frozen=True)
class Report:
    """One run of the benchmark."""

    command: str  # how it was started
    at: str  # when, ISO 8601 with the offset of the time zone
    seconds: float
    machine: Mapping[str, Any]  # what it ran on
    figures: tuple[Figure, ...]
    skipped: tuple[str, ...] = ()  # sentences on what could not be measured

    def of_part(self, part: str) -> list[Figure]:
        return [each for each in self.figures if each.part == part]

    @property
    def verdicts(self) -> dict[str, Figure]:
        """Of each target that was measured, the figure farthest from it, or nearest to missing it."""
        found: dict[str, Figure] = {}
        for key, target in TARGETS.items():
            held = [each for each in self.figures if each.target == key]
            if held:
                pick = min if target.at_least else max
                found[key] = pick(held, key=lambda each: each.median)
        return found

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        targets = [
            {
                "name": TARGETS[key].name,
                "asked": str(TARGETS[key]),
                "of": found.of,
                "median": found.median,
                "met": found.is_met,
            }
            for key, found in self.verdicts.items()
        ]
        figures = [each.plain() for each in self.figures]
        return {"format": FORMAT, **asdict(self), "targets": targets, "figures": figures}


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
