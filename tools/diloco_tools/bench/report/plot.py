"""bench.png: ratios to raw TCP, where the time of a round goes, how it grows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_tools.bench.report.arithmetic import PHASES, slope
from diloco_tools.bench.report.figures import (
    PHASES_OF_ROUNDS,
    TARGETS,
    TRANSPORT,
    TRANSPORT_WITH_FOLD,
    WHOLE_ROUND,
    Figure,
    Report,
)
from diloco_tools.bench.sizes import parameters_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUIET, LINE, GRID = "#5b6068", "#c9ccd1", "#e5e7eb"
MET, MISSED, FREE = "#2f7d5b", "#c2410c", "#6b8cae"
PHASE_COLOURS = ("#8a8f98", "#2f6f9f", "#c2410c", "#2f7d5b", "#b08a2e")
LINE_COLOURS = ("#2f6f9f", "#2f7d5b", "#c2410c")


def draw(report: Report, path: Path) -> bool:
    """Write the picture; False where nothing in the report can be drawn.

    Raises:
        ImportError: matplotlib is missing (the `plot` extra).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    shares, phases, seconds = _shares(report), report.of_part(PHASES_OF_ROUNDS), _seconds(report)
    rows = {each.of for each in phases}
    panels = [
        panel
        for panel in (
            (_ratios, shares, 0.26 * len(shares) + 1.2),
            (_phases, phases, 0.24 * len(rows) + 1.2),
            (_growth, seconds, 3.2),
        )
        if panel[1]
    ]
    if not panels:
        return False
    heights = [height for _, _, height in panels]
    canvas = Canvas(figsize=(9.6, sum(heights)), dpi=120, layout="constrained")
    FigureCanvasAgg(canvas)
    grid = canvas.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for (paint, figures, _), axes in zip(panels, grid[:, 0], strict=True):
        paint(axes, figures)
        axes.tick_params(colors=QUIET, labelsize=8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(LINE)
    canvas.savefig(path)
    return True


def _shares(report: Report) -> list[Figure]:
    """Everything that is a share of raw TCP's speed."""
    return [
        each
        for part in (TRANSPORT, TRANSPORT_WITH_FOLD, WHOLE_ROUND)
        for each in report.of_part(part)
        if each.name.endswith("/ raw") and "CPU" not in each.name
    ]


def _seconds(report: Report) -> list[Figure]:
    """Round times of fp32 replies, where there are several sizes."""
    found = [
        each
        for each in report.of_part(WHOLE_ROUND)
        if each.name == "seconds" and each.of.endswith("fp32")
    ]
    return found if len({each.of.split(",")[0] for each in found}) > 1 else []


def _ratios(axes: Axes, figures: Sequence[Figure]) -> None:
    ways = [each.name.removesuffix("/ raw").strip() for each in figures]
    labels = [
        f"{each.part}: {each.of}{way and f', {way}'}"
        for each, way in zip(figures, ways, strict=True)
    ]
    places = range(len(figures))
    colours = [FREE if each.is_met is None else MET if each.is_met else MISSED for each in figures]
    medians = [each.median for each in figures]
    below = [each.median - each.low for each in figures]
    above = [each.high - each.median for each in figures]
    style: dict[str, Any] = {"ecolor": QUIET, "elinewidth": 0.9}
    axes.barh(list(places), medians, 0.66, color=colours, xerr=[below, above], error_kw=style)
    for place, each in zip(places, figures, strict=True):
        if each.target is not None:
            limit = TARGETS[each.target].limit
            axes.plot([limit, limit], [place - 0.4, place + 0.4], color="black", linewidth=1.4)
    axes.set_yticks(list(places), labels)
    axes.invert_yaxis()
    axes.axvline(1, color=LINE, linewidth=1)
    axes.set_xlim(left=0)
    axes.margins(y=0.02)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_title(
        "speed / raw TCP's: medians and spread; marks are targets (green met, red not)",
        loc="left",
        fontsize=10,
    )


def _phases(axes: Axes, figures: Sequence[Figure]) -> None:
    rows = list(dict.fromkeys(each.of for each in figures))
    found = {(each.of, each.name): each.median for each in figures}
    whole = [sum(found[row, name] for name in PHASES) for row in rows]
    left = [0.0] * len(rows)
    for name, colour in zip(PHASES, PHASE_COLOURS, strict=True):
        widths = [found[row, name] / total for row, total in zip(rows, whole, strict=True)]
        axes.barh(range(len(rows)), widths, 0.66, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, total in enumerate(whole):
        axes.text(1.01, place, f"{total:.0f} ms", va="center", fontsize=8, color=QUIET)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.margins(y=0.02)
    axes.set_title("where a round's time goes", loc="left", fontsize=10)
    axes.legend(
        ncols=len(PHASES), frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.99)
    )


def _growth(axes: Axes, figures: Sequence[Figure]) -> None:
    lines: dict[str, list[tuple[float, Figure]]] = {}
    for each in figures:
        size, workers, _ = each.of.split(", ")
        lines.setdefault(workers, []).append((parameters_of(size) / 1e6, each))
    for (workers, points), colour in zip(lines.items(), LINE_COLOURS, strict=False):
        points.sort(key=lambda point: point[0])
        xs, ys = [x for x, _ in points], [each.median for _, each in points]
        label = f"{workers}: {100 * slope(list(zip(xs, ys, strict=True))):.2f} s for 100M more"
        axes.plot(xs, ys, color=colour, marker="o", markersize=4, linewidth=1.8, label=label)
        low, high = [each.low for _, each in points], [each.high for _, each in points]
        axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("parameters (millions)", color=QUIET, fontsize=9)
    axes.set_ylabel("seconds a round", color=QUIET, fontsize=9)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_title("how a round grows: bf16 up, fp32 down", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
