"""What is lost, and what does harm."""

from __future__ import annotations

from diloco_lab.evidence.claim import OUTER, REPORTED, Arm, Claim, Part, Relation, apart
from diloco_lab.evidence.trial import Trial

SHARES = (10, 30, 50)  # percent

LOSSES = Part(
    "losses",
    "Contributions that are lost",
    "Four workers; in each round each worker's contribution is lost with the given probability: it has "
    "computed for nothing and goes on with what the others have made, as after a restart. (It is sent, "
    "with a billionth of the weight.) Tuned: the outer settings without losses, which all arms have.",
    (
        Arm("none", Trial(workers=4, every=5), OUTER),
        *(
            Arm(f"{share}%", Trial(workers=4, every=5, drop=share / 100), tuned_as="none")
            for share in SHARES
        ),
    ),
    (
        Claim(
            "perplexity with 50% of the contributions lost, against none",
            Relation(most=5),
            apart("50%", "none"),
            "+2.1% (2311.08105, where the worker keeps what it computed)",
        ),
        Claim("with 30% lost", Relation(most=5), apart("30%", "none")),
        Claim("with 10% lost", Relation(most=5), apart("10%", "none")),
    ),
)

_FIVE = Trial(workers=5, steps=300).with_changes(outer_lr=0.8, outer_momentum=0.5)
_AGGREGATES = ("mean", "clip-median-norm", "trimmed-mean", "coordinate-median")
_HARMS = {"enormous": "a thousandfold", "reversed": "threefold, reversed"}


def _name(harm: str, aggregate: str) -> str:
    return f"{_HARMS[harm]}: {aggregate}"


POISON = Part(
    "poison",
    "One of five workers does harm",
    "In each of 30 rounds the last of five workers sends its pseudo-gradient a thousandfold, or "
    "threefold with the sign reversed. Outer learning rate 0.8 and momentum 0.5 throughout.",
    (
        Arm("none does", _FIVE),
        *(
            Arm(_name(harm, aggregate), _FIVE.with_changes(harm=harm, aggregate=aggregate))
            for harm in _HARMS
            for aggregate in _AGGREGATES
        ),
        Arm(
            _name("enormous", "max-delta-norm auto").replace(": ", ": --"),
            _FIVE.with_changes(harm="enormous", max_delta_norm="auto"),
        ),
    ),
    (
        Claim(
            "perplexity under the plain mean, one sends a thousandfold, against nobody",
            Relation(least=20),
            apart(_name("enormous", "mean"), "none does"),
        ),
        *(
            Claim(
                f"under {aggregate}",
                Relation(most=5),
                apart(_name("enormous", aggregate), "none does"),
            )
            for aggregate in _AGGREGATES[1:]
        ),
        Claim(
            "with --max-delta-norm auto",
            Relation(most=5),
            apart("a thousandfold: --max-delta-norm auto", "none does"),
        ),
        Claim(
            "perplexity under the plain mean, one sends threefold and reversed, against nobody",
            REPORTED,
            apart(_name("reversed", "mean"), "none does"),
        ),
        *(
            Claim(
                f"under {aggregate}",
                Relation(most=5),
                apart(_name("reversed", aggregate), "none does"),
            )
            for aggregate in _AGGREGATES[1:]
        ),
    ),
)
