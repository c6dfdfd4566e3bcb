"""The results of a benchmark: ratios, figures with their spread, and targets to compare with. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

from diloco_lab.driver.tables import Table

L = TypeVar("L")
P = TypeVar("P")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def in_turn(
    limit: Callable[[], L], product: Callable[[], P], repeats: int
) -> tuple[list[L], list[P]]:
    """Measure the limit, the product, the limit, ...; one limit more than products."""
    limits, products = [limit()], []
    for _ in range(repeats):
        products.append(product())
        limits.append(limit())
    return limits, products


def around(limits: Sequence[float]) -> list[float]:
    """The limit for each product: the mean of those measured before and after it."""
    return [statistics.fmean(pair) for pair in itertools.pairwise(limits)]


def against(products: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Each product divided by the limits around it."""
    return [each / limit for each, limit in zip(products, around(limits), strict=True)]


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Of the straight line closest to the points (least squares); None if all have one x."""
    if len({x for x, _ in points}) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


class Target(NamedTuple):
    """A bound for a figure."""

    name: str  # in the table
    limit: float  # in the figure's unit
    at_least: bool  # the figure should not be below the limit; else not above
    unit: str  # of its figures

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {show(self.limit, self.unit)}"


TARGETS: Mapping[str, Target] = {
    "round": Target("whole round, in + out / raw TCP", 0.60, True, "x"),
    "broker memory": Target("broker peak beyond its state, 2 workers", 64, False, "MB"),
    "broker growth": Target("broker peak, more for each worker", 8, False, "MB"),
    "worker memory": Target("worker memory / fp32 parameters", 2.6, False, "x"),
    "heartbeat": Target("heartbeat p99 during a round", 20, False, "ms"),
    "turn": Target("longest turn of the loop, thread CPU", 5, False, "ms"),
    "blocked": Target("training blocked beyond the copy, tau 2", 0.02, False, "%"),
    "idle": Target("500 idle workers, of a core", 0.10, False, "%"),
    "cpu": Target("broker CPU per GB, whole round / raw TCP", 2.0, False, "x"),
    "link": Target("share of a 1 Gb/s link, 100 ms", 0.80, True, "%"),
    "int4z loopback": Target("int4z / bf16/fp32, round on loopback", 1.15, False, "x"),
    "int4z 10 Gb/s": Target("int4z / bf16/fp32, computed at 10 Gb/s", 0.50, False, "x"),
    "attached": Target("step with the hook attached / without", 1.01, False, "times"),
}

# Digits behind the point, by unit. A share is kept as a fraction and shown in percent.
_DIGITS = {"x": 2, "times": 3, "GB/s": 2, "s": 3, "ms": 1, "MB": 0, "%": 1, "s/GB": 2, "bits": 2}
RATIOS = ("x", "times")  # shown without a unit


def show(value: float, unit: str) -> str:
    """A value with its unit."""
    if unit == "%":
        return f"{number(value, unit)}%"
    return number(value, unit) if unit in RATIOS else f"{number(value, unit)} {unit}"


def number(value: float, unit: str) -> str:
    """A value without its unit."""
    return f"{100 * value if unit == '%' else value:.{_DIGITS[unit]}f}"


@dataclass(frozen=True)
class Figure:
    """A measured quantity, with several values if possible."""

    part: str  # of the benchmark
    of: str  # the configuration; rows of a table
    name: str  # the quantity; columns of a table
    values: tuple[float, ...]  # in the order of measurement
    unit: str  # x (a ratio), times (one near 1), GB/s, s, ms, MB, s/GB, bits, or % for a fraction
    target: str | None = None  # key in `TARGETS`
    note: str = ""

    def __post_init__(self) -> None:
        has_other_target = self.target is not None and TARGETS[self.target].unit != self.unit
        if not self.values or self.unit not in _DIGITS or has_other_target:
            raise ValueError(f"no values, an unknown unit, or a target in another: {self}")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def is_met(self) -> bool | None:
        """Whether the median is within the target; None without one."""
        return None if self.target is None else TARGETS[self.target].is_met(self.median)


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


@dataclass(frozen=True)
class Report:
    """One run of the benchmark."""

    command: str
    at: str  # the time of its start, ISO 8601 with the offset of the time zone
    seconds: float
    machine: Mapping[str, Any]
    figures: tuple[Figure, ...]
    skipped: tuple[str, ...] = ()  # sentences about missing measurements

    @property
    def verdicts(self) -> dict[str, Figure]:
        """By measured target the worst figure."""
        found: dict[str, Figure] = {}
        for key, target in TARGETS.items():
            held = [each for each in self.figures if each.target == key]
            if held:
                pick = min if target.at_least else max
                found[key] = pick(held, key=lambda each: each.median)
        return found

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        targets = {
            TARGETS[key].name: {"asked": str(TARGETS[key]), "of": of.of, "met": of.is_met}
            for key, of in self.verdicts.items()
        }
        figures = [asdict(each) | {"median": each.median} for each in self.figures]
        return asdict(self) | {"targets": targets, "figures": figures}


LEAST_VALUES = 3  # of a spread


def tables(report: Report) -> list[Table]:
    """One for each part in its order, then the targets; all with rows."""
    found = [
        _part_table(part, [each for each in report.figures if each.part == part])
        for part in dict.fromkeys(each.part for each in report.figures)
    ]
    return [*found, _targets_table(report)] if report.verdicts else found


def _part_table(part: str, figures: Sequence[Figure]) -> Table:
    """Configurations in rows, quantities in columns; medians with their spreads."""
    columns = dict.fromkeys((each.name, each.unit) for each in figures)
    cells = {(each.of, each.name, each.unit): _cell(each) for each in figures}
    rows = dict.fromkeys(each.of for each in figures)
    return Table(
        part,
        part,
        ("", *(name if unit in RATIOS else f"{name}\n{unit}" for name, unit in columns)),
        tuple((row, *(cells.get((row, *column), "") for column in columns)) for row in rows),
    )


def _cell(figure: Figure) -> str:
    return f"{number(figure.median, figure.unit)} {_spread(figure)}".rstrip()


def _spread(figure: Figure) -> str:
    if len(figure.values) < LEAST_VALUES:
        return ""
    low, high = min(figure.values), max(figure.values)
    return f"{number(low, figure.unit)}-{number(high, figure.unit)}"


def _targets_table(report: Report) -> Table:
    """The worst figure of each target."""
    rows = tuple(
        (
            f"{TARGETS[key].name}  {found.of}",
            str(TARGETS[key]),
            show(found.median, found.unit),
            _spread(found),
            "met" if found.is_met else "NOT MET",
        )
        for key, found in report.verdicts.items()
    )
    what = "what, and on what the worst was measured"
    return Table("targets", "targets", (what, "asked", "worst", "spread", ""), rows)


def sentences(report: Report) -> list[str]:
    """The notes below the tables."""
    told = list(report.skipped)
    if not report.verdicts:
        told.append("None of these figures has a target.")
    elif absent := [each.name for key, each in TARGETS.items() if key not in report.verdicts]:
        told.append(f"Not measured here: {'; '.join(absent)}.")
    note = "Each figure is a median, with the least and the greatest value: docs/performance.md."
    return [*told, note]
