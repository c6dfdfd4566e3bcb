"""Plots of curves by matplotlib (the `plot` extra); ImportError without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

QUIET = "#5b6068"  # of frames, ticks and labels
# Distinguishable by colour-blind readers (Okabe and Ito 2008), then greys.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#1f2937", "#9ca3af")
Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A line with its name for the legend.

    Attributes:
        band: the lowest and the highest value at each point; empty: none.
        colour: empty: matplotlib's next colour.
    """

    name: str
    points: Sequence[Point]
    band: Sequence[Point] = ()
    colour: str = ""
    width: float = 2.0
    marker: str = "o"


def panels(width: float, heights: Sequence[float], dpi: int) -> tuple[Any, list[Any]]:
    """A figure and its axes, stacked vertically. Sizes are in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, sum(heights)), dpi=dpi, layout="constrained")
    grid = figure.subplots(len(heights), 1, squeeze=False, height_ratios=list(heights))
    return figure, list(grid[:, 0])


def draw_curves(axes: Any, curves: Sequence[Curve], title: str, x: str, y: str) -> None:
    """Draw curves and label the axes."""
    for each in curves:
        xs, ys = zip(*each.points, strict=True)
        colour = {"color": each.colour} if each.colour else {}
        how = {"linewidth": each.width, "marker": each.marker, "markersize": 4, **colour}
        (line,) = axes.plot(xs, ys, label=each.name, **how)
        if each.band:
            low, high = zip(*each.band, strict=True)
            axes.fill_between(xs, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x, color=QUIET)
    axes.set_ylabel(y, color=QUIET)
    recede(axes)


def recede(axes: Any, grid: Literal["x", "y", "both"] = "y") -> None:
    """Draw frame, ticks and grid quietly, behind the curves."""
    axes.tick_params(colors=QUIET)
    axes.grid(axis=grid, color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c9ccd1")


def legend_below(figure: Any, size: int | None = None) -> None:
    """A legend below the axes."""
    figure.legend(frameon=False, loc="outside lower left", ncols=2, fontsize=size)


def scale_rates(axes: Any, words: Any) -> None:
    """A logarithmic horizontal axis, whose labels `words` makes, and a vertical one in percent."""
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def save(figure: Any, path: Path, style: str = "") -> None:
    """Write it, as a PNG; with a style sheet as a transparent SVG."""
    if not style:
        figure.savefig(path)
        return
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path, transparent=True, metadata={"Date": None})
    head, defs, rest = path.read_text(encoding="utf-8").partition("<defs>")
    path.write_text(f"{head}<style>{style}</style>{defs}{rest}", encoding="utf-8")
