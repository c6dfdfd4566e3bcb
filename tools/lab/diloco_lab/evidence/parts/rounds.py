"""Rounds with more workers, other lengths and other schedules, against one worker, and against all
replicas with one gradient.
"""

from __future__ import annotations

from diloco_lab.evidence.claim import INNER, OUTER, Arm, Part, compared, outer
from diloco_lab.evidence.trial import Trial

ALONE = Arm("one worker", Trial(arm="alone", workers=1, every=5), INNER)


def of(workers: int) -> Arm:
    return Arm(f"M = {workers}", Trial(workers=workers, every=5), OUTER)


WORKERS = Part(
    "workers",
    "More workers, the same number of steps each",
    (ALONE, of(2), of(4), Arm("M = 8", Trial(workers=8, every=5), tuned_as="M = 4")),
    (
        compared(
            "perplexity with 8 workers, against one worker",
            ("M = 8", "one worker"),
            most=-3,
            published="15.02 against 16.23: -7.5% (2311.08105, 150M parameters)",
        ),
        compared("with 4 workers", ("M = 4", "one worker")),
        compared("with 2 workers", ("M = 2", "one worker")),
        compared("perplexity with 8 workers, against 2", ("M = 8", "M = 2"), most=0),
    ),
)


# Gradients of rda are longer, up to twice with four workers: both arms choose from smaller steps, too.
_STEPS = OUTER + outer((0.4, 0.5), (0.5, 0.0))
_FOUR = Trial(workers=4, every=5)

RDA = Part(
    "rda",
    "Mean length times mean direction",
    (
        Arm("mean", _FOUR, _STEPS),
        Arm("rda", _FOUR.with_changes(aggregate="rda"), _STEPS),
    ),
    (compared("perplexity with `--aggregate rda`, against the mean", ("rda", "mean"), most=0),),
)


def replicas(workers: int) -> Arm:
    trial = Trial(arm="data-parallel", workers=workers, every=5)
    return Arm(f"data-parallel, M = {workers}", trial, INNER)


DATA_PARALLEL = Part(
    "data-parallel",
    "Data-parallel training at equal tokens",
    (replicas(2), of(2), replicas(4), of(4)),
    (
        compared(
            "perplexity of DiLoCo with 2 workers, against data-parallel",
            ("M = 2", "data-parallel, M = 2"),
            published="0 to +4% at small scale (2503.09799)",
        ),
        compared("with 4 workers, against data-parallel", ("M = 4", "data-parallel, M = 4")),
    ),
)


def every(steps: int) -> Arm:
    # Points of the curve at the same steps.
    return Arm(f"H = {steps}", Trial(sync_every=steps, every=max(1, 50 // steps)), OUTER)


SYNC_EVERY = Part(
    "sync-every",
    "Steps between two rounds",
    tuple(map(every, (5, 10, 25, 50))),
    (
        compared("perplexity with H = 25, against H = 5", ("H = 25", "H = 5"), most=5),
        compared("with H = 50", ("H = 50", "H = 5")),
        compared("with H = 10", ("H = 10", "H = 5")),
    ),
)


def outer_arm(name: str, eta: float, mu: float, **schedule: str) -> Arm:
    return Arm(name, Trial(every=5).with_changes(outer_lr=eta, outer_momentum=mu, **schedule))


SCHEDULES = Part(
    "schedules",
    "Schedules of the outer optimizer",
    (
        outer_arm(".7, .9", 0.7, 0.9),
        outer_arm(".7, .5 to .9 in 200", 0.7, 0.9, outer_momentum_warmup="linear:200:0.5"),
        outer_arm(".7, 0 to .9 in 100", 0.7, 0.9, outer_momentum_warmup="linear:100:0"),
        outer_arm(".7 to .07 in 100, .9", 0.7, 0.9, outer_lr_schedule="cosine:100:0.1"),
        outer_arm(".8, .5", 0.8, 0.5),
    ),
    (
        compared(
            "perplexity with the default warm-up (0.5 to 0.9 in 200 rounds), against 0.9 throughout",
            (".7, .5 to .9 in 200", ".7, .9"),
            most=-3,
        ),
        compared(
            "with the default warm-up, against the constant 0.8 and 0.5",
            (".7, .5 to .9 in 200", ".8, .5"),
            most=2,
        ),
        compared(
            "with a learning rate that falls to a tenth, against a constant one",
            (".7 to .07 in 100, .9", ".7, .9"),
            most=0,
            published="Pier decays it (2511.17849)",
        ),
    ),
)
