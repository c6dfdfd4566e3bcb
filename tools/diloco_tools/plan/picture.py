"""The plot of an answer: the share of training over the speed of the links."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from diloco_protocol.errors import UsageError
from diloco_protocol.quantities import parameters
from diloco_tools import pictures
from diloco_tools.pictures import (
    QUIET,
    draw_curves,
    legend_below,
    panels,
    recede,
    save,
    scale_rates,
)
from diloco_tools.plan.answer import answer
from diloco_tools.plan.quantities import of_bits, of_share
from diloco_tools.plan.question import Question
from diloco_tools.plan.search import PIECES, candidates
from diloco_tools.plan.simulated.costs import Costs

COLOURS = ("#c2410c", "#0f766e", "#1d4ed8", "#7c3aed")
# Factors on the links of the question at which each curve is simulated.
FACTORS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16, 32)

Curve = tuple[str, list[tuple[float, float]]]


def curves(
    question: Question, costs: Costs, told: Callable[[str], None] = lambda _: None
) -> list[Curve]:
    """For each setting, points of (bits a second of the broker's link, share of time in training).

    The settings are those of the question, the fewest bytes, and both in fragments that overlap with
    training.
    """
    every = list(candidates(question))
    few = min(every, key=lambda q: (q.fragments != question.fragments, _bits(q)))
    split = [q for q in every if q.delay_steps is None and q.fragments > 1 and q is not question]
    chosen = [question, few, *split[:1], *split[-1:]]
    found: list[Curve] = []
    for each in dict.fromkeys(chosen):
        told(label(each))
        points = []
        for factor in FACTORS:
            at = with_lines(each, factor)
            with suppress(UsageError):  # links too slow for any connection
                points.append((at.broker_link, answer(at, costs, PIECES).utilisation))
        found.append((label(each), points))
    return found


def label(question: Question) -> str:
    codecs = f"{question.wire_dtype}/{question.reply_dtype}"
    if question.delay_steps is None:
        return f"{codecs}, P = {question.fragments}, overlapping"
    return codecs if question.fragments == 1 else f"{codecs}, P = {question.fragments}"


def with_lines(question: Question, factor: float) -> Question:
    """The same question with all links between broker and workers scaled by this factor."""
    downs = question.links_down
    site = None if question.site_link is None else question.site_link * factor
    return replace(
        question,
        broker_link=question.broker_link * factor,
        links=tuple(each * factor for each in question.links),
        links_down=None if downs is None else tuple(each * factor for each in downs),
        site_link=site,
    )


def _bits(question: Question) -> float:
    found = answer(question, Costs(), 1)
    return found.bytes_in + found.bytes_out


def draw(question: Question, found: list[Curve], path: Path, target: float | None = None) -> None:
    """Write the curves to `path`. Needs matplotlib (the `plot` extra), else ImportError."""
    figure, (axes,) = panels(7.6, [4.4], dpi=130)
    title = (
        f"{parameters(question.parameters)} parameters, {question.workers} workers, {question.mode}, "
        f"H = {question.sync_every} of {question.step_s:g} s"
    )
    same = set(question.links) | set(question.links_down or ()) == {question.broker_link}
    others = "each link" if same else "the broker's link; the others in proportion"
    shown = [
        pictures.Curve(name, points, colour=colour)
        for (name, points), colour in zip(found, COLOURS, strict=False)
    ]
    scale_rates(axes, of_bits)
    draw_curves(axes, shown, title, f"{others}, each way", "share of the time in training")
    recede(axes, grid="both")
    axes.axvline(question.broker_link, color=QUIET, linewidth=1, linestyle="--")
    axes.text(question.broker_link, 0.02, " as asked", color=QUIET, ha="left", va="bottom")
    if target is not None:
        axes.axhline(target, color=QUIET, linewidth=1, linestyle=":")
        axes.text(found[0][1][0][0], target, of_share(target), color=QUIET, va="bottom")
    axes.set_ylim(0, 1.03)
    legend_below(figure)
    save(figure, path)
