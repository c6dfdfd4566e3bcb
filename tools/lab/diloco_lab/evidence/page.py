"""Tables and pictures of docs/evidence.md: claims, measurements, and verdicts."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from diloco_lab.driver.tables import Table, blocks_of, table_of
from diloco_lab.evidence.claim import DIVERGED, Finding, Result, perplexity, sent
from diloco_lab.evidence.conduct import TUNING_SEED, Conducted, Tuned
from diloco_lab.evidence.training import lost_in
from diloco_lab.evidence.trial import MODELS, Trial, parameters
from diloco_tools.pictures import COLOURS, Curve, draw_curves, legend_below, panels, save


def blocks(names: Iterable[str], found: Sequence[Conducted]) -> dict[str, str]:
    """For the page: a table of claims and one of arms for each of these parts."""
    tables = [table for each in found for table in (_claims(each), _arms(each))]
    keys = [key for name in names for key in (name, f"{name}-arms")]
    return blocks_of(keys, tables, _where(found))


def _where(found: Sequence[Conducted]) -> str:
    """The runs, their machine, and the numbers of verdicts."""
    trials = [Trial.from_plain(r["trial"]) for each in found for r in _results(each)]
    used = [name for name in MODELS if any(trial.model == name for trial in trials)]
    sizes = " and ".join(f"{sum(parameters(name)) / 1e6:.2f}M" for name in used)
    seeds = len({trial.seed for trial in trials})
    made_with = {
        json.dumps(r["versions"], sort_keys=True) for each in found for r in _results(each)
    }
    versions = " and with ".join(
        "torch {torch}, Python {python}".format(**json.loads(each)) for each in sorted(made_with)
    )
    verdicts = [finding.verdict for each in found for finding in each.findings]
    counts = {verdict: verdicts.count(verdict) for verdict in ("PASS", "NOT SHOWN", "reported")}
    return (
        f"Models of {sizes or 'no'} parameters, {seeds} paired seeds, tuned on seed {TUNING_SEED}; "
        f"made with {versions}.\n"
        f"**{counts['PASS']} PASS, {counts['NOT SHOWN']} NOT SHOWN**, {counts['reported']} reported."
    )


def _results(of: Conducted) -> Iterator[Result]:
    for of_seed in of.measured.values():
        yield from of_seed


CLAIMS: Mapping[str, Callable[[Finding], str]] = {
    "claim": lambda of: of.claim.text,
    "expected": lambda of: str(of.claim.relation),
    "measured (each seed)": lambda of: of.told,
    "": lambda of: of.verdict if of.verdict == "reported" else f"**{of.verdict}**",
    "published": lambda of: of.claim.published,
}


def _claims(of: Conducted) -> Table:
    name = of.part.name
    minutes = sum(each["seconds"] for each in _results(of)) / 60
    note = f"`python -m diloco_lab.evidence {name}`: {minutes:.0f} minutes of a core, tuning apart."
    return table_of(name, of.part.title, CLAIMS, of.findings, notes=[note])


def _arms(of: Conducted) -> Table:
    def losses(arm: str) -> str:
        found = [each["loss"] for each in of.measured[arm]]
        return ", ".join("diverged" if loss is None else f"{loss:.4f}" for loss in found)

    def mean(arm: str) -> str:
        values = [perplexity(result) for result in of.measured[arm]]
        return "diverged" if DIVERGED in values else f"{statistics.fmean(values):.3f}"

    columns: dict[str, Callable[[str], str]] = {
        "arm": str,
        "final loss, nats per byte (each seed)": losses,
        "perplexity": mean,
    }
    if of.tuned:
        told = "tuned: loss on the seed of the tuning"
        columns[told] = lambda arm: ", ".join(map(_choice, of.tuned.get(arm, [])))
    return table_of(f"{of.part.name}-arms", of.part.title, columns, of.measured)


def _choice(tuned: Tuned) -> str:
    """As eta / mu, or the inner learning rate, with its loss; the best in bold."""
    loss = "diverged" if tuned.loss is None else f"{tuned.loss:.3f}"
    text = f"{' / '.join(f'{value:g}' for value in tuned.changes.values())}: {loss}"
    return f"**{text}**" if tuned.is_best else text


# The top of a picture, in multiples of the distance from the lowest loss to the curves' median after a
# quarter of their steps: their beginnings and diverging ones are cut off.
HEADROOM = 2.6
LEAST_POINTS = 5  # of a curve
AXES = {
    "steps": "inner steps of each worker",
    "seconds": "virtual seconds",
    "bytes": "bytes sent and received by each worker",
}
# Turns dark words into light ones on a dark page, and keeps the hues of the curves.
ON_DARK = "@media(prefers-color-scheme:dark){svg{filter:invert(1) hue-rotate(180deg)}}"
KILL = "#c81e1e"


def has_curves(of: Conducted) -> bool:
    return all(len(r["curve"]) >= LEAST_POINTS for runs in of.measured.values() for r in runs)


def draw(of: Conducted, folder: Path) -> Path:
    """Write NAME.png: means over the seeds, with bands from the lowest to the highest.

    Against bytes it is NAME.svg, for light and dark pages, with a cross where a worker of the first
    seed was killed. ImportError without matplotlib (the `plot` extra).
    """
    axis, is_log = of.part.axis, of.part.axis == "bytes"
    figure, (axes,) = panels(7.2, [4.0], dpi=110)
    lowest, quarters, shown = [], [], []
    killed: dict[float, float] = {}  # by place, the loss
    speeds = {arm.name: arm.speed if axis == "seconds" else 1.0 for arm in of.part.arms}
    for (name, runs), colour in zip(of.measured.items(), COLOURS, strict=False):
        if points := _band(runs, axis, speeds[name]):
            xs, mean, low, high = zip(*points, strict=True)
            curve, band = list(zip(xs, mean, strict=True)), list(zip(low, high, strict=True))
            label = f"{name}: {mean[-1]:.3f}"
            shown.append(Curve(label, curve, band, colour, width=1.8, marker=""))
            lowest.append(min(low))
            quarters.append(mean[len(mean) // 4])
            killed.update(points[at][:2] for at in kills(runs[0]) if at < len(points))
    loss = "held-out loss (nats per byte)"
    draw_curves(axes, shown, of.part.title, AXES[axis], loss)
    span = statistics.median(quarters) - min(lowest)
    axes.set_ylim(min(lowest) - 0.1 * span, min(lowest) + HEADROOM * span)
    if is_log:
        axes.set_xscale("log", nonpositive="mask")
        axes.xaxis.set_major_formatter(
            lambda place, _: f"{place / 1e9:g} GB" if place >= 1e9 else f"{place / 1e6:g} MB"
        )
        how = {"color": KILL, "markersize": 7, "markeredgewidth": 2, "zorder": 3}
        axes.plot([*killed], [*killed.values()], "x", label="a worker was killed", **how)
    else:
        axes.set_xlim(left=0)
    legend_below(figure, 9)
    path = folder / f"{of.part.name}.{'svg' if is_log else 'png'}"
    save(figure, path, style=ON_DARK) if is_log else save(figure, path)
    return path


def kills(result: Result) -> list[int]:
    """The points of the curve before which a worker was killed."""
    trial = Trial.from_plain(result["trial"])
    lost = [number for number in range(trial.rounds) if trial.drop and lost_in(number, trial)]
    return sorted({math.ceil((number + 1) / trial.every) for number in lost})


def _band(runs: list[Result], axis: str, speed: float) -> list[tuple[float, float, float, float]]:
    """Place, mean, lowest and highest value, as far as all seeds are finite."""
    points = []
    places = sent(runs[0]) if axis == "bytes" else [p[axis == "seconds"] for p in runs[0]["curve"]]
    for place, *seen in zip(places, *(run["curve"] for run in runs), strict=False):
        losses = [loss for *_, loss in seen]
        if None in losses:
            break
        points.append((place / speed, statistics.fmean(losses), min(losses), max(losses)))
    return points
