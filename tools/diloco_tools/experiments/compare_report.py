"""What a comparison of outer optimizers found: a table and a plot, both from the file of results."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_tools.demo.plot import QUIET, recede

# What each variant is called, and its colour.
VARIANTS = {
    "sync": ("sync, Nesterov (DiLoCo)", "#1f2937"),
    "naive": ("async, Nesterov per push", "#dc2626"),
    "dn": ("async, Delayed Nesterov, paper", "#0f766e"),
    "dn-direct": ("async, Delayed Nesterov, direct", "#d97706"),
    "fedbuff": ("async, FedBuff", "#2563eb"),
    "sgd": ("async, SGD 1/k", "#9333ea"),
    "exact": ("sync, Nesterov, fp32", "#64748b"),
    "sync-warm": ("sync, momentum warmed up", "#0891b2"),
    "dn-warm": ("async, Delayed Nesterov, warmed up", "#65a30d"),
}
HEADROOM = 1.06  # of the loss at the start; what lies above is out of the picture and marked

Run = Mapping[str, Any]
Setting = tuple[float, float]  # eta, mu


def by_setting(runs: Sequence[Run]) -> dict[Setting, dict[str, list[Run]]]:
    """The runs of each (eta, mu) and variant, in the order of seeds."""
    found: dict[Setting, dict[str, list[Run]]] = {}
    for run in sorted(runs, key=lambda run: int(run["seed"])):
        of_setting = found.setdefault((run["eta"], run["mu"]), {})
        of_setting.setdefault(run["variant"], []).append(run)
    return {
        setting: {name: variants[name] for name in VARIANTS if name in variants}
        for setting, variants in found.items()
    }


def pairs(runs: Sequence[Run], sync: Sequence[Run]) -> list[tuple[Run, float]]:
    """Each run with the final loss of the synchronous one of the same seed, where that is finite."""
    losses = {run["seed"]: run["final_loss"] for run in sync}
    found = ((run, losses.get(run["seed"])) for run in runs)
    return [(run, loss) for run, loss in found if loss is not None]


def differences(runs: Sequence[Run], sync: Sequence[Run]) -> list[float]:
    """Final loss minus that of the synchronous run of the same seed, where both are finite."""
    found = ((run["final_loss"], loss) for run, loss in pairs(runs, sync))
    return [final - loss for final, loss in found if final is not None]


def markdown(runs: Sequence[Run]) -> str:
    """One row for each setting and variant, with means over the seeds and the differences to sync."""
    lines = [
        "| eta | mu | variant | final loss | minus sync, each seed | mean | diverged | at step "
        "| staleness, mean (most) | virtual s | until sync's final loss |",
        "| --- " * 11 + "|",
    ]
    for (eta, mu), variants in by_setting(runs).items():
        sync = variants.get("sync", [])
        for name, found in variants.items():
            apart = [] if name == "sync" else differences(found, sync)
            diverged = [run for run in found if run["diverged_at"] is not None]
            stale = statistics.mean(run["mean_staleness"] for run in found)
            ends = statistics.mean(run["curve"][-1][1] for run in found)
            cells = [
                f"{eta:g}",
                "-" if name == "sgd" else f"{mu:g}",
                VARIANTS[name][0],
                _final(found),
                ", ".join(f"{each:+.4f}" for each in apart) or "-",
                f"{statistics.mean(apart):+.4f}" if apart else "-",
                f"{len(diverged)} of {len(found)}",
                ", ".join(_where(run) for run in diverged) or "-",
                f"{stale:.2f} ({max(run['max_staleness'] for run in found)})",
                f"{ends:.0f}",
                _reaching(found, sync),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _where(run: Run) -> str:
    """The step at which a run was first seen above its start, and whether it ended below it."""
    came_back = run["final_loss"] is not None and run["final_loss"] <= run["curve"][0][2]
    return f"{run['diverged_at']}{' (came back)' if came_back else ''}"


def _reaching(runs: Sequence[Run], sync: Sequence[Run]) -> str:
    """Mean virtual seconds until the final loss of sync was reached, and by how many if not by all."""
    reached = []
    for run, loss in pairs(runs, sync):
        times = [at for _, at, seen in run["curve"] if seen is not None and seen <= loss]
        reached += times[:1]
    if not reached:
        return "-"
    share = "" if len(reached) == len(runs) else f" ({len(reached)} of {len(runs)})"
    return f"{statistics.mean(reached):.0f}{share}"


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the curves to `path` as a PNG. Needs matplotlib (the `plot` extra), else ImportError.

    A column for each setting; above over inner steps, below over virtual seconds. Lines are means over
    the seeds, bands reach from the lowest to the highest. A line ends where not all seeds are finite.
    """
    from matplotlib.figure import Figure

    settings = by_setting(report["runs"])
    seeds = len({run["seed"] for run in report["runs"]})
    figure = Figure(figsize=(5.2 * len(settings), 8.4), dpi=130, layout="constrained")
    grid = figure.subplots(2, len(settings), squeeze=False, sharey=True)
    starts = [run["curve"][0][2] for run in report["runs"]]
    lowest = min(loss for run in report["runs"] for *_, loss in run["curve"] if loss is not None)
    top = HEADROOM * max(starts)
    for column, ((eta, mu), variants) in enumerate(settings.items()):
        for row, unit in enumerate(("inner steps of all workers together", "virtual seconds")):
            axes = grid[row][column]
            for name, runs in variants.items():
                xs, mean, low, high = _band(runs, row)
                label, colour = VARIANTS[name]
                label += f": {_final(runs)}"
                axes.plot(xs, mean, color=colour, linewidth=1.8, label=label)
                axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.axhline(statistics.mean(starts), color=QUIET, linewidth=0.8, linestyle=":")
            axes.set_ylim(lowest - 0.04 * (top - lowest), top)
            axes.set_xlim(left=0)
            axes.set_xlabel(unit, color=QUIET)
            if column == 0:
                axes.set_ylabel("validation loss (nats per byte)", color=QUIET)
            if row == 0:
                axes.set_title(f"eta {eta:g}, mu {mu:g}", loc="left", fontsize=11)
            else:  # there is room for it, since asynchronous runs end sooner
                axes.legend(frameon=False, loc="center right", fontsize=8.5)
            recede(axes)
    speeds = ", ".join(f"{speed:g}" for speed in report["settings"]["speeds"])
    figure.suptitle(
        f"Workers of {speeds} steps per virtual second, H = {report['settings']['sync_every']}: "
        f"mean and range of {seeds} seeds, and the mean final loss",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    figure.savefig(path)


def _final(runs: Sequence[Run]) -> str:
    losses = [run["final_loss"] for run in runs]
    return "not finite" if None in losses else f"{statistics.mean(losses):.4f}"


def _band(runs: Sequence[Run], row: int) -> list[tuple[float, ...]]:
    """Steps (row 0) or virtual seconds (row 1), and mean, lowest and highest loss over the seeds."""
    points = []
    # A run that ended early is shorter, and what has no loss is not drawn.
    for seen in zip(*(run["curve"] for run in runs), strict=False):
        losses = [loss for *_, loss in seen]
        if None in losses:
            break
        points.append((seen[0][row], statistics.mean(losses), min(losses), max(losses)))
    return list(zip(*points, strict=True))
