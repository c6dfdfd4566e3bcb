"""bench.png: ratios to raw TCP, where the time of a round goes, how it grows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_lab.bench.report.arithmetic import PHASES, slope
from diloco_lab.bench.report.figures import (
    PHASES_OF_ROUNDS,
    TARGETS,
    TRANSPORT,
    TRANSPORT_WITH_FOLD,
    WHOLE_ROUND,
    Figure,
    Report,
)
from diloco_lab.bench.sizes import parameters_of
from diloco_tools.pictures import QUIET, Curve, draw_curves, label_rows, panels, save

COLOURS = {True: "#2f7d5b", False: "#c2410c", None: "#6b8cae"}  # target met, missed, none
PHASE_COLOURS = ("#8a8f98", "#2f6f9f", "#c2410c", "#2f7d5b", "#b08a2e")


def draw(report: Report, path: Path) -> bool:
    """Write the picture; False where nothing in the report can be drawn.

    Raises:
        ImportError: matplotlib is missing (the `plot` extra).
    """
    shares = [  # of raw TCP's speed
        each
        for part in (TRANSPORT, TRANSPORT_WITH_FOLD, WHOLE_ROUND)
        for each in report.of_part(part)
        if each.name.endswith("/ raw") and "CPU" not in each.name
    ]
    phases = report.of_part(PHASES_OF_ROUNDS)
    rows = {each.of for each in phases}
    seconds = [
        each
        for each in report.of_part(WHOLE_ROUND)
        if each.name == "seconds" and each.of.endswith("fp32")
    ]
    sizes = {each.of.split(",")[0] for each in seconds}
    shown = [
        (_ratios, shares, 0.26 * len(shares) + 1.2),
        (_phases, phases, 0.24 * len(rows) + 1.2),
        (_growth, seconds if len(sizes) > 1 else [], 3.2),
    ]
    shown = [panel for panel in shown if panel[1]]
    if not shown:
        return False
    canvas, grid = panels(9.6, [height for _, _, height in shown], dpi=120)
    for (paint, figures, _), axes in zip(shown, grid, strict=True):
        paint(axes, figures)
    save(canvas, path)
    return True


def _ratios(axes: Any, figures: Sequence[Figure]) -> None:
    label_rows(axes, [_label(each) for each in figures], 8)
    axes.margins(y=0.02)
    medians = [each.median for each in figures]
    below = [each.median - each.low for each in figures]
    above = [each.high - each.median for each in figures]
    colours = [COLOURS[each.is_met] for each in figures]
    axes.barh(range(len(figures)), medians, 0.66, color=colours, xerr=[below, above], ecolor=QUIET)
    for place, each in enumerate(figures):
        if each.target is not None:
            limit = TARGETS[each.target].limit
            axes.plot([limit, limit], [place - 0.4, place + 0.4], color="black", linewidth=1.4)
    axes.axvline(1, color=QUIET, linewidth=1)
    axes.set_xlim(left=0)
    text = "speed / raw TCP's: medians and spread; marks are targets (green met, red not)"
    axes.set_title(text, loc="left", fontsize=10)


def _label(share: Figure) -> str:
    way = share.name.removesuffix("/ raw").strip()
    return f"{share.part}: {share.of}{way and f', {way}'}"


def _phases(axes: Any, figures: Sequence[Figure]) -> None:
    rows = list(dict.fromkeys(each.of for each in figures))
    label_rows(axes, rows, 8)
    axes.margins(y=0.02)
    found = {(each.of, each.name): each.median for each in figures}
    whole = [sum(found[row, name] for name in PHASES) for row in rows]
    left = [0.0] * len(rows)
    for name, colour in zip(PHASES, PHASE_COLOURS, strict=True):
        widths = [found[row, name] / total for row, total in zip(rows, whole, strict=True)]
        axes.barh(range(len(rows)), widths, 0.66, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, total in enumerate(whole):
        axes.text(1.01, place, f"{total:.0f} ms", va="center", fontsize=8, color=QUIET)
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.set_title("where a round's time goes", loc="left", fontsize=10)
    axes.legend(
        ncols=len(PHASES), frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.99)
    )


def _growth(axes: Any, figures: Sequence[Figure]) -> None:
    lines: dict[str, list[tuple[float, Figure]]] = {}
    for each in figures:
        size, workers, _ = each.of.split(", ")
        lines.setdefault(workers, []).append((parameters_of(size) / 1e6, each))
    curves = []
    for workers, points in lines.items():
        points.sort(key=lambda point: point[0])
        medians = [(x, each.median) for x, each in points]
        line = slope(medians)
        more = "" if line is None else f": {100 * line:.2f} s for 100M more"
        curves.append(Curve(workers + more, medians, [(each.low, each.high) for _, each in points]))
    title = "how a round grows: bf16 up, fp32 down"
    draw_curves(axes, curves, title, "parameters (millions)", "seconds a round")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
