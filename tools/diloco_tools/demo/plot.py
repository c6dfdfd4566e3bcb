"""loss.png: the two validation curves of a demo."""

from pathlib import Path
from typing import Any

from diloco_tools.demo.results import Point, Results

SINGLE, DILOCO, QUIET = "#8a8f98", "#c2410c", "#5b6068"


def draw(results: Results, path: Path) -> None:
    """Write the curves to `path` as a PNG. Needs matplotlib (the `plot` extra), else ImportError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    settings = results.settings
    figure = Figure(figsize=(7.2, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()

    def curve(points: tuple[Point, ...], colour: str, label: str) -> None:
        steps = [point.step for point in points]
        losses = [point.val_loss for point in points]
        axes.plot(steps, losses, color=colour, linewidth=2, marker="o", markersize=4, label=label)

    curve(results.single_curve, SINGLE, f"one worker: {results.single_curve[-1].val_loss:.3f}")
    curve(
        results.diloco_curve,
        DILOCO,
        f"DiLoCo, {settings.workers} workers, {results.rounds} rounds: "
        f"{results.diloco_curve[-1].val_loss:.3f}",
    )
    text = "Python's standard library" if settings.data is None else Path(settings.data).name
    axes.set_title(
        f"A byte-level GPT of {results.parameters / 1e6:.2f}M parameters on {text}",
        loc="left",
        fontsize=11,
    )
    axes.set_xlabel("inner steps of each worker", color=QUIET)
    axes.set_ylabel("validation loss (nats per byte)", color=QUIET)
    axes.set_xlim(0, settings.steps * 1.02)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    recede(axes)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(path)


def recede(axes: Any) -> None:
    """Have frame, ticks and grid stand behind the curves."""
    axes.tick_params(colors=QUIET)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c9ccd1")
