"""Loss against bytes: rounds of several lengths and codecs, beside data-parallel training."""

from __future__ import annotations

from diloco_lab.evidence.claim import (
    INNER,
    OUTER,
    Arm,
    Claim,
    Measured,
    Part,
    Relation,
    compared,
    sent,
)
from diloco_lab.evidence.parts.communication import SPARSE, SPARSELOCO
from diloco_lab.evidence.trial import Trial

_FOUR = Trial(workers=4, every=5)
_BASE, _LONG, _KILLED, _INT4Z = "data-parallel", "H = 50", "H = 50, workers killed", "H = 50, int4z"


def _like_it(name: str, **changes: str | float) -> Arm:
    trial = _FOUR.with_changes(**{"sync_every": 50, "every": 1, **changes})
    return Arm(name, trial, tuned_as="H = 10")


def _bytes_of_int4z(found: Measured) -> list[float]:
    pairs = zip(found[_INT4Z], found[_BASE], strict=True)
    return [100 * (sent(one)[-1] / sent(other)[-1] - 1) for one, other in pairs]


FRONTIER = Part(
    "frontier",
    "Loss against bytes, four workers",
    (
        Arm(_BASE, _FOUR.with_changes(arm="data-parallel"), INNER),
        Arm("H = 10", _FOUR, OUTER),
        _like_it(_LONG),
        _like_it(_KILLED, drop=0.1),
        _like_it("H = 100", sync_every=100),
        _like_it(_INT4Z, wire_dtype="int4z", reply_dtype="int4z"),
        Arm(
            "H = 50, sparse",
            _FOUR.with_changes(
                **SPARSELOCO | {"outer_lr_schedule": "cosine:20:0.65"},
                sync_every=50,
                every=1,
                wire_dtype=SPARSE,
                reply_dtype="int4z",
            ),
        ),
    ),
    (
        Claim("bytes in int4z, against data-parallel", Relation(most=-99), _bytes_of_int4z),
        compared("perplexity in int4z, against H = 50 in bf16/fp32", (_INT4Z, _LONG), most=3),
        compared("perplexity in int4z, against data-parallel", (_INT4Z, _BASE)),
        compared("with 10% of the workers killed in each round", (_KILLED, _LONG), most=5),
    ),
    axis="bytes",
)
