"""What rounds bring: more workers, other lengths, other schedules; against one worker, and against all
replicas with one gradient.
"""

from __future__ import annotations

from diloco_lab.evidence.claim import INNER, OUTER, REPORTED, Arm, Claim, Part, Relation, apart
from diloco_lab.evidence.trial import Trial

ALONE = Arm("one worker", Trial(arm="alone", workers=1, every=5), INNER)


def of(workers: int) -> Arm:
    return Arm(f"M = {workers}", Trial(workers=workers, every=5), OUTER)


WORKERS = Part(
    "workers",
    "More workers, the same number of steps each",
    "One worker that trains alone, and DiLoCo with M workers that make as many steps each: M times the "
    "text in the same time. Tuned: the inner learning rate of the one worker, the outer settings with 2 "
    "and with 4 workers; 8 have those of 4.",
    (ALONE, of(2), of(4), Arm("M = 8", Trial(workers=8, every=5), tuned_as="M = 4")),
    (
        Claim(
            "perplexity with 8 workers, against one worker",
            Relation(most=-3),
            apart("M = 8", "one worker"),
            "15.02 against 16.23: -7.5% (2311.08105, 150M parameters)",
        ),
        Claim("with 4 workers", REPORTED, apart("M = 4", "one worker")),
        Claim("with 2 workers", REPORTED, apart("M = 2", "one worker")),
        Claim(
            "perplexity with 8 workers, against 2",
            Relation(most=0),
            apart("M = 8", "M = 2"),
        ),
    ),
)

DATA_PARALLEL = Part(
    "data-parallel",
    "Data-parallel training at equal tokens",
    "M replicas with one gradient at each step, which is what DiLoCo saves the traffic of, against "
    "DiLoCo with as many workers, steps and tokens. Tuned: the inner learning rate of the replicas, "
    "the outer settings of DiLoCo.",
    tuple(
        each
        for workers in (2, 4)
        for each in (
            Arm(
                f"data-parallel, M = {workers}",
                Trial(arm="data-parallel", workers=workers, every=5),
                INNER,
            ),
            of(workers),
        )
    ),
    (
        Claim(
            "perplexity of DiLoCo with 2 workers, against data-parallel",
            REPORTED,
            apart("M = 2", "data-parallel, M = 2"),
            "0 to +4% at small scale (2503.09799)",
        ),
        Claim(
            "with 4 workers, against data-parallel",
            REPORTED,
            apart("M = 4", "data-parallel, M = 4"),
        ),
    ),
)

LENGTHS = (5, 10, 25, 50)


def every(steps: int) -> Arm:
    # Points of the curve at the same steps.
    trial = Trial(sync_every=steps, every=max(1, 50 // steps))
    return Arm(f"H = {steps}", trial, OUTER)


SYNC_EVERY = Part(
    "sync-every",
    "Steps between two rounds",
    "Two workers with 1000 steps each in 200 to 20 rounds. Tuned: the outer settings of each H.",
    tuple(every(steps) for steps in LENGTHS),
    (
        Claim(
            "perplexity with H = 25, against H = 5",
            Relation(most=5),
            apart("H = 25", "H = 5"),
        ),
        Claim("with H = 50", REPORTED, apart("H = 50", "H = 5")),
        Claim("with H = 10", REPORTED, apart("H = 10", "H = 5")),
    ),
)


def outer_arm(name: str, eta: float, mu: float, **schedule: str) -> Arm:
    return Arm(name, Trial(every=5).with_changes(outer_lr=eta, outer_momentum=mu, **schedule))


SCHEDULES = Part(
    "schedules",
    "Schedules of the outer optimizer",
    "Two workers, 100 rounds of H = 10: the published outer momentum from the first round on, warmed "
    "up, with a learning rate that falls, and the smaller momentum that small runs do well with.",
    (
        outer_arm(".7, .9", 0.7, 0.9),
        outer_arm(".7, .5 to .9 in 200", 0.7, 0.9, outer_momentum_warmup="linear:200:0.5"),
        outer_arm(".7, 0 to .9 in 100", 0.7, 0.9, outer_momentum_warmup="linear:100:0"),
        outer_arm(".7 to .07 in 100, .9", 0.7, 0.9, outer_lr_schedule="cosine:100:0.1"),
        outer_arm(".8, .5", 0.8, 0.5),
    ),
    (
        Claim(
            "perplexity with the default warm-up (0.5 to 0.9 in 200 rounds), against 0.9 throughout",
            Relation(most=-3),
            apart(".7, .5 to .9 in 200", ".7, .9"),
        ),
        Claim(
            "with the default warm-up, against the constant 0.8 and 0.5",
            Relation(most=2),
            apart(".7, .5 to .9 in 200", ".8, .5"),
        ),
        Claim(
            "with a learning rate that falls to a tenth, against a constant one",
            Relation(most=0),
            apart(".7 to .07 in 100, .9", ".7, .9"),
            "Pier decays it (2511.17849)",
        ),
    ),
)
