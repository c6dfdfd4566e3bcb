"""The exchange: in fragments, quantized, and its bytes."""

from __future__ import annotations

import math
from collections.abc import Callable

from diloco_lab.evidence.claim import Arm, Claim, Measured, Part, Relation, Result, compared, outer
from diloco_lab.evidence.trial import Trial, parameters
from diloco_protocol.dtypes import SIZES, SPARSE_KEPT

_DEEPER = Trial(model="0.8M", sync_every=20, every=4)
_PAIR = outer((0.7, 0.9), (0.8, 0.5))


def _streaming(pieces: int, delay: int, **options: float | str) -> Arm:
    trial = _DEEPER.with_changes(num_fragments=pieces, fragment_sync_delay=delay, **options)
    merge = "".join(f", {name.rpartition('_')[2]} {value}" for name, value in options.items())
    return Arm(f"P = {pieces}, tau = {delay}{merge}", trial, tuned_as="whole model")


FRAGMENTS = Part(
    "fragments",
    "Streaming fragments",
    (
        Arm("whole model", _DEEPER, _PAIR),
        _streaming(4, 0),
        _streaming(4, 2),
        _streaming(4, 2, fragment_update_alpha=0.5),
        _streaming(4, 2, fragment_merge="rebase"),
    ),
    (
        compared(
            "perplexity with 4 fragments and no delay, against the whole model",
            ("P = 4, tau = 0", "whole model"),
            most=3,
            published="2.48 against 2.49 nats (2501.18512)",
        ),
        compared(
            "with 4 fragments merged 2 steps later, against the whole model",
            ("P = 4, tau = 2", "whole model"),
            most=3,
        ),
        compared("the same, merged by halves", ("P = 4, tau = 2, alpha 0.5", "whole model")),
        compared(
            "the same, keeping the steps made meanwhile",
            ("P = 4, tau = 2, merge rebase", "whole model"),
        ),
    ),
)

SPARSE = "sparse"  # the name of the sparse codec
CODEC_PAIRS = (
    "bf16/fp32",
    "int8/int8",
    "int4/int4",
    "int4z/int4z",
    f"{SPARSE}/int4z",
    "sparse:128/int4z",
)
# As published: the decayed residual replaces the momentum (SparseLoCo, arXiv 2508.15706).
SPARSELOCO = {
    "outer": "sgd",
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "outer_lr_schedule": "cosine:100:0.65",  # over all rounds of a trial
    "feedback_decay": 0.95,
}


def _in(pair: str) -> Arm:
    up, down = pair.split("/")
    rule = SPARSELOCO if up in SPARSE_KEPT else {"outer_lr": 0.8, "outer_momentum": 0.5}
    return Arm(pair, Trial().with_changes(**rule, wire_dtype=up, reply_dtype=down))


def _against_usual(pair: str) -> Claim:
    kept = SPARSE_KEPT.get(pair.partition("/")[0])
    said = f" ({kept} of 4096 elements, SparseLoCo)" if kept else ""
    return compared(
        f"perplexity in {pair}{said}, against bf16/fp32",
        (pair, "bf16/fp32"),
        most=math.inf if kept else 3,
    )


CODECS = Part(
    "codecs",
    "Quantization",
    tuple(map(_in, CODEC_PAIRS)),
    tuple(map(_against_usual, CODEC_PAIRS[1:])),
)


def _bytes(
    text: str,
    arm: str,
    expected: Callable[[Result], float],
    relation: Relation,
    ways: tuple[str, ...],
    *,
    published: str = "",
) -> Claim:
    """The percentage by which the bytes of a run differ from the expected ones, for each seed."""

    def measure(found: Measured) -> list[float]:
        sent = [(each, sum(each[f"bytes_{way}"] for way in ways)) for each in found[arm]]
        return [100 * (moved / expected(each) - 1) for each, moved in sent]

    return Claim(text, relation, measure, published)


def _element(trial: Trial, way: str) -> float:
    """Bytes of a parameter."""
    option, usual = ("wire_dtype", "bf16") if way == "up" else ("reply_dtype", "fp32")
    return SIZES[trial.broker.get(option, usual)].element


def _against_formula(text: str, arm: str, way: str, percent: int = 1) -> Claim:
    """Up: rounds x workers x parameters x bytes of the wire dtype, and once the first ones in fp32.

    Down: the same in the reply dtype, and once for each worker the first version in fp32.
    """

    def expected(result: Result) -> float:
        trial = Trial.from_plain(result["trial"])
        size = sum(parameters(trial.model))
        first = size if way == "up" else size * trial.workers
        return trial.rounds * trial.workers * size * _element(trial, way) + 4 * first

    return _bytes(text, arm, expected, Relation(-percent, percent), (way,))


def _at_each_step(result: Result) -> float:
    """The bytes of data-parallel training: a gradient up and parameters down, in the same dtypes."""
    trial = Trial.from_plain(result["trial"])
    steps = trial.steps * trial.workers * sum(parameters(trial.model))
    return steps * (_element(trial, "up") + _element(trial, "down"))


TRAFFIC = Part(
    "traffic",
    "Bytes on the wire",
    tuple(map(_in, ("bf16/fp32", "int8/int8", "int4z/int4z"))),
    (
        _against_formula("bytes up in bf16, against the formula", "bf16/fp32", "up"),
        _against_formula("bytes down in fp32, against the formula", "bf16/fp32", "down"),
        _against_formula("bytes up in int8", "int8/int8", "up"),
        _against_formula("bytes down in int8", "int8/int8", "down"),
        _against_formula(
            "bytes up in int4z, against about 2.2 bits a parameter", "int4z/int4z", "up", 15
        ),
        _bytes(
            "bytes both ways with H = 10, against data-parallel training",
            "bf16/fp32",
            _at_each_step,
            Relation(most=-88),
            ("up", "down"),
            published="1/H, and the first parameters",
        ),
    ),
)
