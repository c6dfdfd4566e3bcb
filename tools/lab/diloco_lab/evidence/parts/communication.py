"""What travels: in fragments, in few bits, and how much."""

from __future__ import annotations

from collections.abc import Callable

from diloco_lab.evidence.claim import REPORTED, Arm, Claim, Measured, Part, Relation, apart, outer
from diloco_lab.evidence.trial import Trial, parameters
from diloco_protocol.dtypes import SIZES

_DEEPER = Trial(model="0.8M", sync_every=20, every=4)
_PAIR = outer((0.7, 0.9), (0.8, 0.5))


def _streaming(pieces: int, delay: int, **options: float | str) -> Arm:
    trial = _DEEPER.with_changes(num_fragments=pieces, fragment_sync_delay=delay, **options)
    merge = "".join(f", {name.rpartition('_')[2]} {value}" for name, value in options.items())
    return Arm(f"P = {pieces}, tau = {delay}{merge}", trial, tuned_as="whole model")


FRAGMENTS = Part(
    "fragments",
    "Streaming fragments",
    "Two workers, a model of four layers, H = 20: the whole model at once, and P fragments one after "
    "the other, merged tau steps after they were sent. The most that is sent at once "
    "falls to 1/P. Tuned: the outer settings of the whole model, which all arms have.",
    (
        Arm("whole model", _DEEPER, _PAIR),
        _streaming(4, 0),
        _streaming(4, 2),
        _streaming(4, 2, fragment_update_alpha=0.5),
        _streaming(4, 2, fragment_merge="rebase"),
    ),
    (
        Claim(
            "perplexity with 4 fragments and no delay, against the whole model",
            Relation(most=3),
            apart("P = 4, tau = 0", "whole model"),
            "2.48 against 2.49 nats (2501.18512)",
        ),
        Claim(
            "with 4 fragments merged 2 steps later, against the whole model",
            Relation(most=3),
            apart("P = 4, tau = 2", "whole model"),
        ),
        Claim(
            "the same, merged by halves",
            REPORTED,
            apart("P = 4, tau = 2, alpha 0.5", "whole model"),
        ),
        Claim(
            "the same, keeping the steps made meanwhile",
            REPORTED,
            apart("P = 4, tau = 2, merge rebase", "whole model"),
        ),
    ),
)

CODEC_PAIRS = ("bf16/fp32", "int8/int8", "int4/int4", "int4z/int4z", "top64/int4z")


def _in(pair: str) -> Arm:
    up, down = pair.split("/")
    trial = Trial().with_changes(outer_lr=0.8, outer_momentum=0.5, wire_dtype=up, reply_dtype=down)
    return Arm(pair, trial)


CODECS = Part(
    "codecs",
    "Few bits",
    "Two workers, 100 rounds of H = 10, pseudo-gradients and parameters in each pair of dtypes (up / "
    "down), with error feedback up and EF21-P down. Outer learning rate 0.8 and momentum 0.5 "
    "throughout.",
    tuple(_in(pair) for pair in CODEC_PAIRS),
    tuple(
        Claim(
            f"perplexity in {pair}, against bf16/fp32",
            REPORTED if pair.startswith("top64") else Relation(most=3),
            apart(pair, "bf16/fp32"),
        )
        for pair in CODEC_PAIRS[1:]
    ),
)


def _against_formula(arm: str, way: str) -> Callable[[Measured], list[float]]:
    """By how many percent the bytes of a run differ from what the formula says, seed by seed.

    Up: rounds x workers x parameters x bytes of the wire dtype, and once the first parameters in fp32.
    Down: the same in the reply dtype, and once for each worker the first version in fp32.
    """

    def measure(found: Measured) -> list[float]:
        values = []
        for result in found[arm]:
            trial = Trial.from_plain(result["trial"])
            size = sum(parameters(trial.model))
            rounds = trial.rounds * trial.workers * size
            if way == "up":
                dtype, first = trial.broker.get("wire_dtype", "bf16"), size
            else:
                dtype, first = trial.broker.get("reply_dtype", "fp32"), size * trial.workers
            expected = rounds * SIZES[dtype].element + 4 * first
            values.append(100 * (result[f"bytes_{way}"] / expected - 1))
        return values

    return measure


def _less(arm: str) -> Callable[[Measured], list[float]]:
    """By how many percent a run's bytes are below those of data-parallel training.

    That sends a gradient up and parameters down at each step, in the same dtypes as the arm's.
    """

    def measure(found: Measured) -> list[float]:
        values = []
        for result in found[arm]:
            trial = Trial.from_plain(result["trial"])
            up = SIZES[trial.broker.get("wire_dtype", "bf16")].element
            down = SIZES[trial.broker.get("reply_dtype", "fp32")].element
            steps = trial.steps * trial.workers * sum(parameters(trial.model))
            sent = result["bytes_up"] + result["bytes_down"]
            values.append(100 * (sent / (steps * (up + down)) - 1))
        return values

    return measure


TRAFFIC = Part(
    "traffic",
    "Bytes on the wire",
    "What the workers of the arms above have counted, headers of messages and all, against rounds x "
    "workers x parameters x bytes, and the first parameters; and against data-parallel training, which "
    "would send as much at each of the H steps.",
    tuple(_in(pair) for pair in ("bf16/fp32", "int8/int8", "int4z/int4z")),
    (
        Claim(
            "bytes up in bf16, against the formula",
            Relation(-1, 1),
            _against_formula("bf16/fp32", "up"),
        ),
        Claim(
            "bytes down in fp32, against the formula",
            Relation(-1, 1),
            _against_formula("bf16/fp32", "down"),
        ),
        Claim("bytes up in int8", Relation(-1, 1), _against_formula("int8/int8", "up")),
        Claim("bytes down in int8", Relation(-1, 1), _against_formula("int8/int8", "down")),
        Claim(
            "bytes up in int4z, against about 2.2 bits a parameter",
            Relation(-15, 15),
            _against_formula("int4z/int4z", "up"),
        ),
        Claim(
            "bytes both ways with H = 10, against data-parallel training",
            Relation(most=-88),
            _less("bf16/fp32"),
            "1/H, and the first parameters",
        ),
    ),
)
