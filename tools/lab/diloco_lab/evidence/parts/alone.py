"""One worker with an outer optimizer of its own, and Muon as the inner one (MuLoCo)."""

from __future__ import annotations

from diloco_lab.evidence.claim import INNER, Arm, Part, compared, outer
from diloco_lab.evidence.trial import Trial

# 990 steps are 33 rounds of the published H.
_ALONE = Trial(arm="alone", workers=1, steps=990, sync_every=30, every=3)
_LOCAL = _ALONE.with_changes(arm="local")
_FOUR = _ALONE.with_changes(arm="diloco", workers=4)
# As published for one worker (2503.09799), of MuLoCo, and nearly none.
_FOR_ONE = outer((0.4, 0.9), (0.7, 0.5), (1.0, 0.2))
_OFTEN = {"sync_every": 10, "outer_lr": 0.7, "outer_momentum": 0.5}
_FASTER = {"lr": 3e-3, "outer_lr": 0.7, "outer_momentum": 0.5}  # the best rate of Muon alone
_FOR_FOUR = outer((0.7, 0.9), (0.7, 0.6), (0.7, 0.8))
_MUON = {"inner": "muon"}

LOCAL = Part(
    "local",
    "One worker with an outer optimizer",
    (Arm("AdamW", _ALONE, INNER), Arm("with outer steps", _LOCAL, (*_FOR_ONE, _OFTEN))),
    (
        compared(
            "perplexity with outer steps, against the inner optimizer alone",
            ("with outer steps", "AdamW"),
            most=0,
            published="DiLoCo with M = 1 is better than data-parallel (2503.09799)",
        ),
    ),
)

MULOCO = Part(
    "muloco",
    "Muon as the inner optimizer",
    (
        Arm("AdamW, K = 1", _LOCAL, _FOR_ONE),
        Arm("Muon alone", _ALONE.with_changes(**_MUON), INNER),
        Arm("Muon, K = 1", _LOCAL.with_changes(**_MUON), (*_FOR_ONE, _FASTER)),
        Arm("AdamW, K = 4", _FOUR, _FOR_FOUR),
        Arm("Muon, K = 4", _FOUR.with_changes(**_MUON), _FOR_FOUR),
    ),
    (
        compared(
            "perplexity of Muon, K = 1, against AdamW, K = 1",
            ("Muon, K = 1", "AdamW, K = 1"),
            most=0,
        ),
        compared("of Muon, K = 1, against Muon alone", ("Muon, K = 1", "Muon alone")),
        compared(
            "of Muon, K = 4, against AdamW, K = 4",
            ("Muon, K = 4", "AdamW, K = 4"),
            most=0,
            published="8 times fewer bytes at equal loss (2505.23725)",
        ),
    ),
)
