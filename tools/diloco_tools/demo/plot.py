"""loss.png: the validation curves of a demo."""

from pathlib import Path
from typing import Any, Literal

from diloco_tools.demo.results import Record

SAME_STEPS, SAME_TOKENS, DILOCO, QUIET = "#8a8f98", "#2563eb", "#c2410c", "#5b6068"


def draw(summary: Record, path: Path) -> None:
    """Write the curves to `path` as a PNG. Needs matplotlib (the `plot` extra), else ImportError."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 4.2), dpi=130, layout="constrained")
    axes = figure.add_subplot()

    diloco = summary["diloco"]
    labels = (
        (summary["single"], SAME_STEPS, "one worker, same steps"),
        (diloco, DILOCO, f"DiLoCo, {diloco['workers']} workers, {diloco['rounds']} rounds"),
        (summary["same_tokens"], SAME_TOKENS, "one worker, same tokens (data-parallel)"),
    )
    for run, colour, name in labels:
        steps = [point["step"] for point in run["curve"]]
        losses = [point["val_loss"] for point in run["curve"]]
        label = f"{name}: {run['val_loss']:.3f}"
        axes.plot(steps, losses, color=colour, linewidth=2, marker="o", markersize=4, label=label)
    data, millions = summary["settings"]["data"], summary["parameters"] / 1e6
    text = "Python's standard library" if data is None else Path(data).name
    title = f"A byte-level GPT of {millions:.2f}M parameters on {text}"
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("inner steps of each worker", color=QUIET)
    axes.set_ylabel("validation loss (nats per byte)", color=QUIET)
    axes.set_xlim(0, diloco["steps"] * 1.02)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    recede(axes)
    figure.legend(frameon=False, loc="outside lower left", ncols=2)  # it covers no curve
    figure.savefig(path)


def recede(axes: Any, grid: Literal["x", "y"] = "y") -> None:
    """Have frame, ticks and grid stand behind the curves."""
    axes.tick_params(colors=QUIET)
    axes.grid(axis=grid, color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c9ccd1")
