"""Workers of different speed: rounds that wait for the slowest, and asynchronous outer optimizers."""

from __future__ import annotations

from diloco_lab.evidence.claim import (
    OUTER,
    OUTER_PER_PUSH,
    REPORTED,
    Arm,
    Choices,
    Claim,
    Part,
    Relation,
    apart,
    sooner,
)
from diloco_lab.evidence.trial import Trial

# Inner steps per second of four devices (arXiv 2401.09135).
SPEEDS = (0.58, 0.75, 1.51, 3.33)
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
    "Four workers of 0.58, 0.75, 1.51 and 3.33 steps a second, in virtual time. All arms make the same "
    "number of steps in sum; in rounds each worker makes a quarter and the slowest is waited for, "
    "asynchronously the fast ones make more. Tuned: the outer settings of each arm; `naive` and "
    "`sync` are also shown with the published 0.7 and 0.9.",
    (
        Arm("sync", _SYNC, OUTER, speed=min(SPEEDS)),
        _by("Delayed Nesterov", outer="dn"),
        _by("DN, direct", OUTER + OUTER_PER_PUSH, outer="dn", dn_variant="direct"),
        _by("FedBuff", outer="fedbuff"),
        Arm("sync, .7 and .9", _SYNC.with_changes(**_PUBLISHED), speed=min(SPEEDS)),
        Arm("naive, .7 and .9", _ASYNC.with_changes(outer="nesterov", **_PUBLISHED)),
        Arm("naive, tuned", _ASYNC.with_changes(outer="nesterov"), OUTER_PER_PUSH),
    ),
    (
        Claim(
            "perplexity of Delayed Nesterov, against sync",
            Relation(most=3),
            apart("Delayed Nesterov", "sync"),
            f"41.13 against 41.35: -0.5%, with DyLU ({PAPER})",
        ),
        Claim(
            "of Nesterov at each push with the published 0.7 and 0.9, against sync with the same",
            Relation(least=5),
            apart("naive, .7 and .9", "sync, .7 and .9"),
        ),
        Claim(
            "of Nesterov at each push, tuned, against sync",
            Relation(least=5),
            apart("naive, tuned", "sync"),
            f"44.27 against 41.35: +7% ({PAPER})",
        ),
        Claim(
            "of Delayed Nesterov, against Nesterov at each push, tuned",
            Relation(most=0),
            apart("Delayed Nesterov", "naive, tuned"),
        ),
        Claim("of FedBuff, against sync", REPORTED, apart("FedBuff", "sync")),
        Claim(
            "of DN's `direct` variant, against the paper's",
            REPORTED,
            apart("DN, direct", "Delayed Nesterov"),
        ),
        Claim(
            "time of Delayed Nesterov until it is within 1% of the final loss of sync, against sync",
            Relation(most=-10),
            sooner("Delayed Nesterov", "sync", min(SPEEDS)),
            never="not reached",
        ),
    ),
    axis="seconds",
)

_OUTER = {"outer_lr": 0.8, "outer_momentum": 0.5}
_ROUNDS = "sync, H = 25"
_LONGER = _ASYNC.with_changes(sync_every=25, every=2, outer="dn", **_OUTER)

DYLU = Part(
    "dylu",
    "Dynamic Local Updates",
    "The same four workers with Delayed Nesterov and H = 25, with and without Dynamic Local Updates: "
    "a worker's H is what a broker works out for its speed (4, 5, 11 and 25 steps). Outer learning "
    "rate 0.8 and momentum 0.5 throughout.",
    (
        Arm(
            _ROUNDS,
            _SYNC.with_changes(sync_every=25, every=2, **_OUTER),
            speed=min(SPEEDS),
        ),
        Arm("same H", _LONGER),
        Arm("DyLU", _LONGER.with_changes(dylu=True)),
    ),
    (
        Claim(
            "perplexity with DyLU, against the same H for all",
            Relation(most=0),
            apart("DyLU", "same H"),
            f"with it Delayed Nesterov is as good as sync ({PAPER})",
        ),
        Claim(
            "time until the loss is within 1% of the final one of sync with DyLU, against sync",
            Relation(most=-10),
            sooner("DyLU", _ROUNDS, min(SPEEDS)),
            never="not reached",
        ),
        Claim(
            "the same without DyLU",
            REPORTED,
            sooner("same H", _ROUNDS, min(SPEEDS)),
            never="not reached",
        ),
    ),
    axis="seconds",
)
