"""Workers of different speed: rounds that wait for the slowest, and asynchronous outer optimizers."""

from __future__ import annotations

from diloco_lab.evidence.claim import (
    OUTER,
    OUTER_ADAM,
    OUTER_PER_PUSH,
    Arm,
    Choices,
    Part,
    compared,
    sooner,
)
from diloco_lab.evidence.trial import Trial

# Inner steps per second of four devices (arXiv 2401.09135).
SPEEDS = (0.58, 0.75, 1.51, 3.33)
SLOWEST = min(SPEEDS)
PAPER = "2401.09135"

_SYNC = Trial(workers=4, every=5)
_ASYNC = _SYNC.with_changes(mode="async", speeds=SPEEDS)


def _by(name: str, choices: Choices = OUTER, **options: str) -> Arm:
    return Arm(name, _ASYNC.with_changes(**options), choices)


# As published for synchronous rounds (arXiv 2311.08105).
_PUBLISHED = {"outer_lr": 0.7, "outer_momentum": 0.9}


ASYNCHRONOUS = Part(
    "async",
    "Asynchronous outer optimizers, workers of different speed",
    (
        Arm("sync", _SYNC, OUTER, speed=SLOWEST),
        _by("Delayed Nesterov", outer="dn"),
        _by("DN, direct", OUTER + OUTER_PER_PUSH, outer="dn", dn_variant="direct"),
        _by("FedBuff", outer="fedbuff"),
        Arm("sync, .7 and .9", _SYNC.with_changes(**_PUBLISHED), speed=SLOWEST),
        Arm("naive, .7 and .9", _ASYNC.with_changes(outer="nesterov", **_PUBLISHED)),
        Arm("naive, tuned", _ASYNC.with_changes(outer="nesterov"), OUTER_PER_PUSH),
    ),
    (
        compared(
            "perplexity of Delayed Nesterov, against sync",
            ("Delayed Nesterov", "sync"),
            most=3,
            published=f"41.13 against 41.35: -0.5%, with DyLU ({PAPER})",
        ),
        compared(
            "of Nesterov at each push with the published 0.7 and 0.9, against sync with the same",
            ("naive, .7 and .9", "sync, .7 and .9"),
            least=5,
        ),
        compared(
            "of Nesterov at each push, tuned, against sync",
            ("naive, tuned", "sync"),
            least=5,
            published=f"44.27 against 41.35: +7% ({PAPER})",
        ),
        compared(
            "of Delayed Nesterov, against Nesterov at each push, tuned",
            ("Delayed Nesterov", "naive, tuned"),
            most=0,
        ),
        compared("of FedBuff, against sync", ("FedBuff", "sync")),
        compared(
            "of DN's `direct` variant, against the paper's", ("DN, direct", "Delayed Nesterov")
        ),
        sooner(
            "time of Delayed Nesterov until it is within 1% of the final loss of sync, against sync",
            ("Delayed Nesterov", "sync"),
            SLOWEST,
            most=-10,
        ),
    ),
    axis="seconds",
)

_RIVALS = ("Delayed Nesterov", "naive, tuned")
CGAD = Part(
    "cgad",
    "Adam that weighs stale pushes, workers of different speed",
    (
        _by("CGAD", OUTER_ADAM, outer="cgad"),
        *(arm for arm in ASYNCHRONOUS.arms if arm.name in _RIVALS),
    ),
    (
        compared(
            "perplexity of CGAD, against Delayed Nesterov", ("CGAD", "Delayed Nesterov"), most=0
        ),
        compared("against Nesterov at each push, tuned", ("CGAD", "naive, tuned"), most=0),
    ),
    axis="seconds",
)

_OUTER = {"outer_lr": 0.8, "outer_momentum": 0.5}
_ROUNDS = "sync, H = 25"
_LONGER = _ASYNC.with_changes(sync_every=25, every=2, outer="dn", **_OUTER)

DYLU = Part(
    "dylu",
    "Dynamic Local Updates",
    (
        Arm(_ROUNDS, _SYNC.with_changes(sync_every=25, every=2, **_OUTER), speed=SLOWEST),
        Arm("same H", _LONGER),
        Arm("DyLU", _LONGER.with_changes(dylu=True)),
    ),
    (
        compared(
            "perplexity with DyLU, against the same H for all",
            ("DyLU", "same H"),
            most=0,
            published=f"with it Delayed Nesterov is as good as sync ({PAPER})",
        ),
        sooner(
            "time until the loss is within 1% of the final one of sync with DyLU, against sync",
            ("DyLU", _ROUNDS),
            SLOWEST,
            most=-10,
        ),
        sooner("the same without DyLU", ("same H", _ROUNDS), SLOWEST),
    ),
    axis="seconds",
)
