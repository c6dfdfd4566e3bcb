"""loss.png: the validation curves of a demo."""

from pathlib import Path

from diloco_tools.demo.results import Record
from diloco_tools.pictures import Curve, draw_curves, legend_below, panels, save

SAME_STEPS, SAME_TOKENS, DILOCO = "#8a8f98", "#2563eb", "#c2410c"


def draw(summary: Record, path: Path) -> None:
    """Write the curves to `path` as a PNG. Needs matplotlib (the `plot` extra), else ImportError."""
    figure, (axes,) = panels(7.2, [4.2], dpi=130)
    diloco = summary["diloco"]
    runs = (
        (summary["single"], SAME_STEPS, "one worker, same steps"),
        (diloco, DILOCO, f"DiLoCo, {diloco['workers']} workers, {diloco['rounds']} rounds"),
        (summary["same_tokens"], SAME_TOKENS, "one worker, same tokens (data-parallel)"),
    )
    curves = [
        Curve(
            f"{name}: {run['val_loss']:.3f}",
            [(point["step"], point["val_loss"]) for point in run["curve"]],
            colour=colour,
        )
        for run, colour, name in runs
    ]
    data, millions = summary["settings"]["data"], summary["parameters"] / 1e6
    text = "Python's standard library" if data is None else Path(data).name
    title = f"A byte-level GPT of {millions:.2f}M parameters on {text}"
    draw_curves(
        axes, curves, title, "inner steps of each worker", "validation loss (nats per byte)"
    )
    axes.set_xlim(0, diloco["steps"] * 1.02)
    axes.locator_params(axis="y", nbins=6)
    legend_below(figure)
    save(figure, path)
