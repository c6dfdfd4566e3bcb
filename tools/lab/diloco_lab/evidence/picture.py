"""A picture of each part: the curves of its arms, or where they have but an end, their losses."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from diloco_lab.evidence.claim import Result
from diloco_lab.evidence.conduct import Conducted
from diloco_tools.pictures import (
    COLOURS,
    QUIET,
    Curve,
    draw_curves,
    label_rows,
    legend_below,
    panels,
    save,
)

# The top of a picture, in distances from the lowest loss to where curves are after a quarter of their
# way, on the median: where they begin is of no interest, nor how far one of them goes astray.
HEADROOM = 2.6
AXES = {"steps": "inner steps of each worker", "seconds": "virtual seconds"}


def draw(of: Conducted, folder: Path) -> Path:
    """Write NAME.png; ImportError without matplotlib (the `plot` extra). Returns its path."""
    figure, (axes,) = panels(7.2, [4.0], dpi=110)
    has_curves = all(len(each["curve"]) > 4 for runs in of.measured.values() for each in runs)
    (_curves if has_curves else _ends)(axes, of)
    if has_curves:
        legend_below(figure, 9)
    path = folder / f"{of.part.name}.png"
    save(figure, path)
    return path


def _curves(axes: Any, of: Conducted) -> None:
    """Lines are means over the seeds, bands reach from the lowest to the highest."""
    lowest, highest, shown = [], [], []
    speeds = {arm.name: arm.speed for arm in of.part.arms}
    for (name, runs), colour in zip(of.measured.items(), COLOURS, strict=False):
        speed = speeds[name] if of.part.axis == "seconds" else 1.0
        points = _band(runs, of.part.axis, speed)
        if not points:
            continue
        xs, mean, low, high = zip(*points, strict=True)
        curve, band = list(zip(xs, mean, strict=True)), list(zip(low, high, strict=True))
        shown.append(Curve(f"{name}: {mean[-1]:.3f}", curve, band, colour, width=1.8, marker=""))
        lowest.append(min(low))
        highest.append(mean[len(mean) // 4])
    loss = "held-out loss (nats per byte)"
    draw_curves(axes, shown, of.part.title, AXES[of.part.axis], loss)
    span = statistics.median(highest) - min(lowest)
    axes.set_ylim(min(lowest) - 0.1 * span, min(lowest) + HEADROOM * span)
    axes.set_xlim(left=0)


def _band(runs: list[Result], axis: str, speed: float) -> list[tuple[float, float, float, float]]:
    """Where, mean, lowest, highest; as far as all seeds are finite."""
    points = []
    for seen in zip(*(run["curve"] for run in runs), strict=False):
        losses = [loss for *_, loss in seen]
        if None in losses:
            break
        where = seen[0][axis == "seconds"] / speed
        points.append((where, statistics.fmean(losses), min(losses), max(losses)))
    return points


def _ends(axes: Any, of: Conducted) -> None:
    """A dot for each seed, a line at the mean; what has diverged is at the right edge."""
    names = list(of.measured)
    finite = [r["loss"] for runs in of.measured.values() for r in runs if r["loss"] is not None]
    most = min(max(finite), statistics.median(finite) * 1.6)
    for place, runs in enumerate(of.measured.values()):
        losses = [most if run["loss"] is None else min(run["loss"], most) for run in runs]
        axes.plot(losses, [place] * len(losses), "o", color=COLOURS[0], alpha=0.6, markersize=6)
        axes.plot([statistics.fmean(losses)], [place], "|", color=COLOURS[1], markersize=18)
        if any(run["loss"] is None or run["loss"] > most for run in runs):
            axes.annotate(
                "off the scale",
                (most, place),
                (-8, 6),
                textcoords="offset points",
                ha="right",
                fontsize=8,
            )
    label_rows(axes, names, 9)
    axes.set_title(of.part.title, loc="left", fontsize=11)
    axes.set_xlabel("final held-out loss (nats per byte), each seed and the mean", color=QUIET)
