"""A picture of each part: the curves of its arms, or where they have but an end, their losses."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from diloco_lab.evidence.claim import Result
from diloco_lab.evidence.conduct import Conducted
from diloco_tools.demo.plot import QUIET, recede

# Told apart also by people who do not see red from green (Okabe and Ito 2008), then greys.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#1f2937", "#9ca3af")
# The top of a picture, in distances from the lowest loss to where curves are after a quarter of their
# way, on the median: where they begin is of no interest, nor how far one of them goes astray.
HEADROOM = 2.6
AXES = {"steps": "inner steps of each worker", "seconds": "virtual seconds"}


def draw(of: Conducted, folder: Path) -> Path:
    """Write NAME.png; ImportError without matplotlib (the `plot` extra). Returns its path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    has_curves = all(len(each["curve"]) > 4 for runs in of.measured.values() for each in runs)
    (_curves if has_curves else _ends)(axes, of)
    axes.set_title(of.part.title, loc="left", fontsize=11)
    path = folder / f"{of.part.name}.png"
    figure.savefig(path)
    return path


def _curves(axes: Any, of: Conducted) -> None:
    """Lines are means over the seeds, bands reach from the lowest to the highest."""
    lowest, highest = [], []
    speeds = {arm.name: arm.speed for arm in of.part.arms}
    for (name, runs), colour in zip(of.measured.items(), COLOURS, strict=False):
        speed = speeds[name] if of.part.axis == "seconds" else 1.0
        points = _band(runs, of.part.axis, speed)
        if not points:
            continue
        xs, mean, low, high = zip(*points, strict=True)
        axes.plot(xs, mean, color=colour, linewidth=1.8, label=f"{name}: {mean[-1]:.3f}")
        axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        lowest.append(min(low))
        highest.append(mean[len(mean) // 4])
    span = statistics.median(highest) - min(lowest)
    axes.set_ylim(min(lowest) - 0.1 * span, min(lowest) + HEADROOM * span)
    axes.set_xlim(left=0)
    axes.set_xlabel(AXES[of.part.axis], color=QUIET)
    axes.set_ylabel("held-out loss (nats per byte)", color=QUIET)
    axes.figure.legend(frameon=False, loc="outside lower left", ncols=2, fontsize=9)
    recede(axes)


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
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("final held-out loss (nats per byte), each seed and the mean", color=QUIET)
    recede(axes, grid="x")
