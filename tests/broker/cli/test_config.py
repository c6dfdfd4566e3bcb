"""Options that cannot work together are refused with one sentence that names the values."""

from pathlib import Path
from typing import Any

import pytest

from diloco_broker import BrokerConfig
from diloco_broker.config.presets import PRESETS
from diloco_broker.core.rounds.modes import mode_of
from diloco_protocol import UsageError

# Values that are refused alone, and options of which the last does not go with the others.
VALUES: dict[str, list[Any]] = {
    "mode": ["both"],
    "workers": [0, 2.5, True, 10**9],
    "bind": ["localhost:", "tcp://127.0.0.1:99999", "tcp://[::1:5"],
    "feed": ["tcp://::1:5"],
    "outer_lr": [float("nan"), 0.0, 1e308],
    "wire_dtype": ["int3"],
    "reply_dtype": ["int2"],
    "heartbeat_timeout": [-1],
    "quorum": [0],
    "grace": [3.0, float("inf"), "auto"],
    "late": ["drop", "forget"],
    "sync_every": [2**62],
    "fragment_sync_delay": ["soon", 1.5],
    "fragment_update_alpha": [-0.1, 1.1],
    "fragment_merge": ["mean"],
    "fragment_pattern": ["odd"],
    "dylu": [True],
    "dylu_min_steps": [5],
    "staleness_weight": ["poly"],
    "max_staleness": [2],
    "deterministic": ["false"],
    "aggregate": ["max"],
    "weight_by": ["age"],
    "outer": ["cgad", "adam"],
    "outer_momentum_warmup": ["cosine:10:1.0"],
    "max_delta_norm": [0.0, "ten"],
    "trim": [0.1],
    "outer_momentum": [1.0, float("nan")],
    "dn_buffer": [4],
    "dn_c": [0.5],
    "dn_variant": ["mine"],
    "staging_slots": [5, 0],
    "staging_deadline": [5.0, 0.0],
    "outer_lr_schedule": ["cosine:0"],
    "outer_momentum_restart": [1],
    "fragment_plan": [len],
    "save_dir": [5, ""],
    "resume": [None],
    "save_every": [10**12],
}
TOGETHER: list[dict[str, Any]] = [
    {"workers": 2, "min_workers": 3},
    {"mode": "async", "workers": 2, "min_workers": 2},
    {"workers": 2, "quorum": 3},
    {"workers": 3, "min_workers": 2, "quorum": 1},
    {"mode": "async", "quorum": 1},
    {"quorum": 1, "grace": "soon"},
    {"mode": "async", "grace": "auto"},
    {"quorum": 1, "grace": 1e308},
    {"num_fragments": 4, "sync_every": 3},
    {"sync_every": 10, "num_fragments": 3, "fragment_sync_delay": 3},
    {"num_fragments": 2, "deterministic": True, "fragment_sync_delay": "auto"},
    {"sync_every": 10, "fragment_sync_delay": "auto", "fragment_max_delay": 10},
    {"sync_every": 10, "fragment_sync_delay": 3, "fragment_max_delay": 2},
    {"sync_every": 10, "fragment_max_delay": 10},
    {"fragment_merge": "rebase", "fragment_update_alpha": 0.5},
    {"mode": "async", "dylu_min_steps": 5},
    {"mode": "async", "dylu": True, "fragment_sync_delay": 5, "dylu_min_steps": 5},
    {"mode": "async", "outer": "cgad", "staleness_weight": "poly"},
    {"mode": "async", "deterministic": True},
    {"mode": "async", "aggregate": "clip-median-norm"},
    {"mode": "async", "aggregate": "trimmed-mean"},
    {"mode": "async", "aggregate": "rda"},
    {"mode": "async", "weight_by": "tokens"},
    {"max_delta_norm": 3, "weight_by": "samples"},
    {"aggregate": "coordinate-median", "weight_by": "tokens"},
    {"mode": "async", "outer": "cgad", "cgad_cutoff": 0},
    {"mode": "async", "outer": "sgd", "cgad_cutoff": 9},
    {"mode": "async", "outer": "cgad", "outer_momentum_warmup": "linear:10"},
    {"outer": "sgd", "outer_momentum_warmup": "linear:10"},
    {"mode": "async", "cgad_decay": 0.5},
    {"workers": 2, "max_delta_norm": "auto"},
    {"aggregate": "trimmed-mean", "trim": 0.5},
    {"outer": "sgd", "outer_momentum": 0.5},
    {"mode": "async", "workers": 4, "dn_c": 0.3},
    {"mode": "async", "workers": 2, "dn_variant": "direct", "dn_c": 0.5},
    {"outer": "sgd", "dn_variant": "direct"},
    {"outer": "sgd", "outer_momentum_restart": 8},
    {"outer": "dn", "dn_buffer": 4, "outer_momentum_restart": 4},
    {"outer": "dn", "dn_buffer": 4, "outer_momentum_restart": 6},
]


@pytest.mark.parametrize(
    "options",
    [*({name: value} for name in VALUES for value in VALUES[name]), *TOGETHER],
    ids=lambda options: str(options)[:60],
)
def test_bad_configuration_is_refused_in_a_sentence(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        BrokerConfig(**options)
    wrong = "--" + [*options][-1].replace("_", "-")
    assert str(caught.value).startswith(f"{wrong} is "), "the option and its value come first"


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 4, "quorum": 4, "grace": 5.0, "late": "drop", "deterministic": True},
        {"sync_every": 4, "num_fragments": 4},
        {"sync_every": 4, "num_fragments": 4, "fragment_sync_delay": "auto"},
        {"sync_every": 4, "fragment_sync_delay": "auto", "fragment_max_delay": 3},
        {"sync_every": 1, "fragment_sync_delay": "auto"},
        {"sync_every": 9, "num_fragments": 3, "fragment_sync_delay": 2},
        {"mode": "async", "workers": 4, "dn_c": 0.25},
        {"mode": "async", "dylu": True, "sync_every": 8, "dylu_min_steps": 8},
        {"mode": "async", "outer": "fedbuff", "dn_buffer": 3, "grace": 1.0},
        {"mode": "async", "workers": 4, "outer_momentum_restart": 2},
        {"outer": "dn", "dn_buffer": 4, "outer_momentum_restart": 8},
    ],
    ids=str,
)
def test_options_at_their_limits_are_accepted(options: dict[str, Any]) -> None:
    BrokerConfig(**options)


def test_paths_are_kept_as_text_since_checkpoints_hold_the_options() -> None:
    paths = {
        name: Path("a") / name for name in ("save_dir", "resume", "audit", "tape", "fragment_plan")
    }
    config = BrokerConfig(**paths)  # type: ignore[arg-type]
    assert {name: getattr(config, name) for name in paths} == {n: str(p) for n, p in paths.items()}


def test_preset_equals_its_options_given_one_by_one() -> None:
    plain = BrokerConfig(outer="sgd", outer_lr=1.0, outer_momentum=0.0, sync_every=50)
    assert BrokerConfig.from_preset("finetune", sync_every=50) == plain
    assert BrokerConfig.from_preset("diloco", workers=3) == BrokerConfig(workers=3)
    paper = BrokerConfig.from_preset("diloco-paper", outer_lr=0.4)
    assert paper == BrokerConfig(outer="nesterov", outer_momentum_warmup="constant", outer_lr=0.4)
    for name in PRESETS:
        BrokerConfig.from_preset(name, workers=4)


def test_defaults_follow_the_mode() -> None:
    assert BrokerConfig(workers=4).outer_name == "nesterov"
    there = BrokerConfig(workers=4, mode="async")
    assert (there.outer_name, there.dn_size) == ("dn", 4)
    assert BrokerConfig(workers=4, outer="dn").dn_size == 1
    least = BrokerConfig(mode="async", dylu=True, num_fragments=3, fragment_sync_delay=2)
    assert least.least_steps == 9


@pytest.mark.parametrize(
    ("options", "delay", "longest"),
    [
        ({}, 0, 0),
        ({"num_fragments": 4}, "auto", 10),
        ({"num_fragments": 4, "fragment_max_delay": 25}, "auto", 25),
        ({"num_fragments": 40}, "auto", 1),
        ({"num_fragments": 4, "mode": "async"}, "auto", 10),
        ({"num_fragments": 4, "deterministic": True}, 0, 0),
        ({"num_fragments": 4, "fragment_sync_delay": 0}, 0, 0),
        ({"num_fragments": 4, "fragment_sync_delay": 3}, 3, 3),
        ({"fragment_sync_delay": "auto"}, "auto", 20),
    ],
    ids=str,
)
def test_fragments_overlap_by_default_until_the_next_slot(
    options: dict[str, Any], delay: int | str, longest: int
) -> None:
    config = BrokerConfig(sync_every=40, **options)
    assert (config.fragment_sync_delay, config.longest_delay) == (delay, longest)
    told = config.run_config
    assert (told.fragment_sync_delay, told.fragment_delay_auto) == (
        (0, True) if delay == "auto" else (delay, False)
    )
    assert config.fewest_steps == config.num_fragments * (told.fragment_sync_delay + 1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, ""),
        ({"mode": "async"}, "--mode async"),
        ({"quorum": 1}, "--quorum"),
        ({"deterministic": True}, "--deterministic"),
        ({"aggregate": "clip-median-norm"}, "--aggregate clip-median-norm"),
        ({"weight_by": "tokens"}, ""),
        ({"max_delta_norm": 2.0}, "--max-delta-norm"),
        ({"max_delta_norm": 2.0, "mode": "async"}, "--mode async"),
    ],
)
def test_options_that_need_complete_pushes(options: dict[str, Any], why: str) -> None:
    config = BrokerConfig(**options)
    reducer = mode_of(config)
    assert (reducer.asked_for_by(config), reducer.needs_whole) == (why, bool(why))
