"""A picture of a part whose arms have curves."""

from __future__ import annotations

import statistics
from pathlib import Path

from diloco_lab.evidence.claim import Result
from diloco_lab.evidence.conduct import Conducted
from diloco_tools.pictures import COLOURS, Curve, draw_curves, legend_below, panels, save

# The top of a picture, in distances from the lowest loss to where curves are after a quarter of their
# way, on the median: where they begin is of no interest, nor how far one of them goes astray.
HEADROOM = 2.6
LEAST_POINTS = 5  # of a curve
AXES = {"steps": "inner steps of each worker", "seconds": "virtual seconds"}


def has_curves(of: Conducted) -> bool:
    return all(len(r["curve"]) >= LEAST_POINTS for runs in of.measured.values() for r in runs)


def draw(of: Conducted, folder: Path) -> Path:
    """Write NAME.png: means over the seeds, with bands from the lowest to the highest.

    ImportError without matplotlib (the `plot` extra).
    """
    figure, (axes,) = panels(7.2, [4.0], dpi=110)
    lowest, quarters, shown = [], [], []
    speeds = {arm.name: arm.speed if of.part.axis == "seconds" else 1.0 for arm in of.part.arms}
    for (name, runs), colour in zip(of.measured.items(), COLOURS, strict=False):
        if points := _band(runs, of.part.axis, speeds[name]):
            xs, mean, low, high = zip(*points, strict=True)
            curve, band = list(zip(xs, mean, strict=True)), list(zip(low, high, strict=True))
            label = f"{name}: {mean[-1]:.3f}"
            shown.append(Curve(label, curve, band, colour, width=1.8, marker=""))
            lowest.append(min(low))
            quarters.append(mean[len(mean) // 4])
    loss = "held-out loss (nats per byte)"
    draw_curves(axes, shown, of.part.title, AXES[of.part.axis], loss)
    span = statistics.median(quarters) - min(lowest)
    axes.set_ylim(min(lowest) - 0.1 * span, min(lowest) + HEADROOM * span)
    axes.set_xlim(left=0)
    legend_below(figure, 9)
    path = folder / f"{of.part.name}.png"
    save(figure, path)
    return path


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
