"""Lost and harmful contributions."""

from __future__ import annotations

from collections.abc import Iterator

from diloco_lab.evidence.claim import OUTER, Arm, Claim, Part, compared
from diloco_lab.evidence.trial import Trial

_FOUR = Trial(workers=4, every=5)

LOSSES = Part(
    "losses",
    "Contributions that are lost",
    (
        Arm("none", _FOUR, OUTER),
        *(
            Arm(f"{share}%", _FOUR.with_changes(drop=share / 100), tuned_as="none")
            for share in (10, 30, 50)
        ),
    ),
    (
        compared(
            "perplexity with 50% of the contributions lost, against none",
            ("50%", "none"),
            most=5,
            published="+2.1% (2311.08105, where the worker keeps what it computed)",
        ),
        compared("with 30% lost", ("30%", "none"), most=5),
        compared("with 10% lost", ("10%", "none"), most=5),
    ),
)

_FIVE = Trial(workers=5, steps=300).with_changes(outer_lr=0.8, outer_momentum=0.5)
_AGGREGATES = ("mean", "clip-median-norm", "trimmed-mean", "coordinate-median")
_HARMS = {"enormous": "a thousandfold", "reversed": "threefold, reversed"}
_LIMITED = "a thousandfold: --max-delta-norm auto"


def _under(harm: str) -> Iterator[Claim]:
    """Each defence against this harm."""
    for aggregate in _AGGREGATES[1:]:
        arms = (f"{_HARMS[harm]}: {aggregate}", "none does")
        yield compared(f"under {aggregate}", arms, most=5)


POISON = Part(
    "poison",
    "One of five workers does harm",
    (
        Arm("none does", _FIVE),
        *(
            Arm(f"{told}: {aggregate}", _FIVE.with_changes(harm=harm, aggregate=aggregate))
            for harm, told in _HARMS.items()
            for aggregate in _AGGREGATES
        ),
        Arm(_LIMITED, _FIVE.with_changes(harm="enormous", max_delta_norm="auto")),
    ),
    (
        compared(
            "perplexity under the plain mean, one sends a thousandfold, against no attack",
            ("a thousandfold: mean", "none does"),
            least=20,
        ),
        *_under("enormous"),
        compared("with --max-delta-norm auto", (_LIMITED, "none does"), most=5),
        compared(
            "perplexity under the plain mean, one sends threefold and reversed, against no attack",
            ("threefold, reversed: mean", "none does"),
        ),
        *_under("reversed"),
    ),
)
