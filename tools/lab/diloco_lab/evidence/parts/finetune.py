"""Fine-tuning: adapters of a trained model, in few rounds, by presets."""

from __future__ import annotations

from diloco_lab.evidence.claim import Arm, Part, compared, outer
from diloco_lab.evidence.trial import Trial

# 40 rounds. Adapters need larger inner learning rates than all parameters.
_FOUR = Trial(workers=4, steps=400, every=4, lora=8)
_RATES = tuple({"lr": lr} for lr in (1.5e-3, 5e-3, 15e-3))
_BASE = "data-parallel"
# What the presets set: once one changes, its runs must be repeated, and a test says so.
_NESTEROV = {**outer((0.7, 0.9))[0], "outer_lr_schedule": "constant", "nesterov": True}
_PRESETS = {
    "finetune": {**outer((1.0, 0.0))[0], "outer": "sgd", "fragment_update_alpha": 0.0},
    "diloco": {**_NESTEROV, "outer_momentum_warmup": "linear:200:0.5"},
    "diloco-paper": {**_NESTEROV, "outer": "nesterov", "outer_momentum_warmup": "constant"},
}


def _with(name: str) -> Arm:
    return Arm(f"preset {name}", _FOUR.with_changes(**_PRESETS[name]), _RATES)


FINETUNE = Part(
    "finetune",
    "LoRA fine-tuning by presets",
    (
        Arm(_BASE, _FOUR.with_changes(arm="data-parallel"), _RATES),
        _with("finetune"),
        _with("diloco"),
        _with("diloco-paper"),
    ),
    (
        compared(
            "perplexity with preset finetune, against preset diloco",
            ("preset finetune", "preset diloco"),
            most=0,
        ),
        compared(
            "with preset finetune, against preset diloco-paper",
            ("preset finetune", "preset diloco-paper"),
            most=0,
        ),
        compared(
            "with preset finetune, against data-parallel",
            ("preset finetune", _BASE),
            published="loses 0.6% (27B)",
        ),
        compared("with preset diloco, against data-parallel", ("preset diloco", _BASE)),
        compared(
            "with preset diloco-paper, against data-parallel",
            ("preset diloco-paper", _BASE),
            published="loses 9.9% (27B)",
        ),
    ),
)
