"""Presets: named groups of options, for `diloco-broker serve --preset` and `BrokerConfig.from_preset`.

A preset fills in options that were not given. Nothing else depends on its name: checkpoints, standbys
and workers compare the options themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_broker.config.declaration import AUTO, Options
from diloco_broker.config.option import one_of, refusal
from diloco_broker.config.schedule import CONSTANT

_DEFAULTS = ("outer_lr", "outer_momentum", "outer_lr_schedule", "outer_momentum_warmup", "nesterov")
PRESETS: dict[str, dict[str, Any]] = {
    "diloco": {name: getattr(Options, name) for name in _DEFAULTS},
    # An average without memory. Published LoRA runs of 27B with 43 rounds lose 9.9% with Nesterov .7/.9
    # against synchronous training, and 0.6% with a memoryless average.
    "finetune": {
        "outer": "sgd",
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "fragment_update_alpha": 0.0,
    },
    # arXiv 2508.15706: the decayed error feedback of workers replaces the outer momentum.
    "sparseloco": {
        "wire_dtype": "sparse",
        "feedback_decay": 0.95,
        "outer": "sgd",
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "outer_lr_schedule": "linear:1000:0.65",
    },
    # arXiv 2604.21428: no worker waits for another.
    "decoupled": {
        "quorum": 1,
        "grace": AUTO,
        "late": "drop",
        "num_fragments": 4,
        "weight_by": "tokens2-per-step",
        "aggregate": "rda",
    },
    # arXiv 2311.08105, whose momentum does not warm up.
    "diloco-paper": {
        "outer": "nesterov",
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "outer_lr_schedule": CONSTANT,
        "outer_momentum_warmup": CONSTANT,
        "nesterov": True,
    },
}


def preset(name: str) -> dict[str, Any]:
    """The options of a preset; raises UsageError for an unknown name."""
    if name not in PRESETS:
        raise refusal("preset", name, one_of(*PRESETS).what)
    return PRESETS[name]


def summary(name: str, given: Mapping[str, Any]) -> str:
    """Which options a preset sets besides those that are given, and which of its own these override."""
    row = preset(name)
    sets = ", ".join(_words(each, value) for each, value in row.items() if each not in given)
    other = [each for each in row if each in given and given[each] != row[each]]
    overridden = ", ".join(_words(each, given[each]) for each in other)
    return (
        f"Preset {name}: {sets or 'nothing'}" + (f"; overridden: {overridden}" * bool(other)) + "."
    )


def _words(name: str, value: Any) -> str:
    """An option as on the command line."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {value:g}" if isinstance(value, float) else f"--{option} {value}"
