"""Options that cannot work together are refused with one sentence that names the values."""

from pathlib import Path
from typing import Any

import pytest

from diloco_broker import BrokerConfig
from diloco_broker.config.presets import PRESETS
from diloco_broker.core.rounds.modes import mode_of
from diloco_protocol import UsageError

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mode": "both"}, "--mode"),
    ({"workers": 0}, "--workers"),
    ({"workers": 2.5}, "--workers"),
    ({"workers": True}, "--workers"),
    ({"bind": "localhost:"}, "--bind"),
    ({"bind": "tcp://127.0.0.1:99999"}, "--bind"),
    ({"bind": "tcp://[::1:5"}, "--bind"),
    ({"feed": "tcp://::1:5"}, "--feed"),
    ({"workers": 2, "min_workers": 3}, "--min-workers"),
    ({"outer_lr": float("nan")}, "--outer-lr"),
    ({"wire_dtype": "int3"}, "--wire-dtype"),
    ({"reply_dtype": "int2"}, "--reply-dtype"),
    ({"heartbeat_timeout": -1}, "--heartbeat-timeout"),
    ({"workers": 2, "quorum": 3}, "--quorum"),
    ({"workers": 3, "quorum": 1, "min_workers": 2}, "--quorum"),
    ({"quorum": 0}, "--quorum"),
    ({"grace": 3.0}, "--grace"),
    ({"late": "drop"}, "--late"),
    ({"late": "forget"}, "--late"),
    ({"grace": float("inf")}, "--grace"),
    ({"grace": "auto"}, "--grace"),
    ({"quorum": 1, "grace": "soon"}, "--grace"),
    ({"mode": "async", "grace": "auto"}, "--grace"),
    ({"sync_every": 3, "num_fragments": 4}, "--sync-every"),
    ({"sync_every": 10, "num_fragments": 3, "fragment_sync_delay": 3}, "--fragment-sync-delay"),
    ({"fragment_sync_delay": "soon"}, "--fragment-sync-delay"),
    ({"fragment_sync_delay": 1.5}, "--fragment-sync-delay"),
    (
        {"num_fragments": 2, "deterministic": True, "fragment_sync_delay": "auto"},
        "--fragment-sync-delay",
    ),
    (
        {"sync_every": 10, "fragment_sync_delay": "auto", "fragment_max_delay": 10},
        "--fragment-max-delay",
    ),
    ({"fragment_update_alpha": -0.1}, "--fragment-update-alpha"),
    ({"fragment_update_alpha": 1.1}, "--fragment-update-alpha"),
    ({"fragment_update_alpha": 0.5, "fragment_merge": "rebase"}, "--fragment-update-alpha"),
    ({"fragment_merge": "mean"}, "--fragment-merge"),
    ({"fragment_pattern": "odd"}, "--fragment-pattern"),
    ({"sync_every": 10, "fragment_sync_delay": 3, "fragment_max_delay": 2}, "--fragment-max-delay"),
    ({"sync_every": 10, "fragment_max_delay": 10}, "--fragment-max-delay"),
    ({"dylu": True}, "--dylu"),
    ({"dylu_min_steps": 5}, "--dylu-min-steps"),
    ({"mode": "async", "dylu_min_steps": 5}, "--dylu-min-steps"),
    (
        {
            "mode": "async",
            "dylu": True,
            "dylu_min_steps": 5,
            "num_fragments": 3,
            "fragment_sync_delay": 1,
        },
        "--dylu-min-steps",
    ),
    ({"staleness_weight": "poly"}, "--staleness-weight"),
    ({"max_staleness": 2}, "--max-staleness"),
    ({"mode": "async", "workers": 2, "min_workers": 2}, "--min-workers"),
    ({"mode": "async", "quorum": 1}, "--quorum"),
    ({"mode": "async", "deterministic": True}, "--deterministic"),
    ({"mode": "async", "aggregate": "clip-median-norm"}, "--aggregate"),
    ({"mode": "async", "weight_by": "tokens"}, "--weight-by"),
    ({"mode": "async", "aggregate": "trimmed-mean"}, "--aggregate"),
    ({"mode": "async", "aggregate": "rda"}, "--aggregate"),
    ({"outer": "cgad"}, "--outer"),
    ({"mode": "async", "outer": "cgad", "staleness_weight": "poly"}, "--staleness-weight"),
    ({"mode": "async", "outer": "cgad", "cgad_cutoff": 0}, "--cgad-cutoff"),
    (
        {"mode": "async", "outer": "cgad", "outer_momentum_warmup": "linear:10"},
        "--outer-momentum-warmup",
    ),
    ({"mode": "async", "cgad_decay": 0.5}, "--cgad-decay"),
    ({"mode": "async", "outer": "sgd", "cgad_cutoff": 9}, "--cgad-cutoff"),
    ({"aggregate": "max"}, "--aggregate"),
    ({"max_delta_norm": 0.0}, "--max-delta-norm"),
    ({"max_delta_norm": "ten"}, "--max-delta-norm"),
    ({"max_delta_norm": "auto", "workers": 2}, "--max-delta-norm"),
    ({"max_delta_norm": 3, "weight_by": "samples"}, "--weight-by"),
    ({"trim": 0.1}, "--trim"),
    ({"aggregate": "trimmed-mean", "trim": 0.5}, "--trim"),
    ({"aggregate": "coordinate-median", "weight_by": "tokens"}, "--weight-by"),
    ({"weight_by": "age"}, "--weight-by"),
    ({"outer": "adam"}, "--outer"),
    ({"outer_momentum": 1.0}, "--outer-momentum"),
    ({"outer_momentum": float("nan")}, "--outer-momentum"),
    ({"outer_lr": 0.0}, "--outer-lr"),
    ({"dn_buffer": 4}, "--dn-buffer"),
    ({"mode": "async", "workers": 4, "dn_c": 0.3}, "--dn-c"),
    ({"dn_c": 0.5}, "--dn-c"),
    ({"mode": "async", "workers": 2, "dn_variant": "direct", "dn_c": 0.5}, "--dn-c"),
    ({"outer": "sgd", "dn_variant": "direct"}, "--dn-variant"),
    ({"dn_variant": "mine"}, "--dn-variant"),
    ({"staging_slots": 5}, "--staging-slots"),
    ({"staging_deadline": 5.0}, "--staging-deadline"),
    ({"outer": "sgd", "outer_momentum": 0.5}, "--outer-momentum"),
    ({"outer_lr_schedule": "cosine:0"}, "--outer-lr-schedule"),
    ({"outer_momentum_warmup": "cosine:10:1.0"}, "--outer-momentum-warmup"),
    ({"outer": "sgd", "outer_momentum_warmup": "linear:10"}, "--outer-momentum-warmup"),
    ({"outer_momentum_restart": 1}, "--outer-momentum-restart"),
    ({"outer": "sgd", "outer_momentum_restart": 8}, "--outer-momentum-restart"),
    ({"outer": "dn", "dn_buffer": 4, "outer_momentum_restart": 4}, "--outer-momentum-restart"),
    ({"outer": "dn", "dn_buffer": 4, "outer_momentum_restart": 6}, "--outer-momentum-restart"),
    ({"fragment_plan": len}, "--fragment-plan"),
    ({"save_dir": 5}, "--save-dir"),
    ({"save_dir": ""}, "--save-dir"),
    ({"resume": None}, "--resume"),
    ({"deterministic": "false"}, "--deterministic"),
    ({"staging_slots": 0}, "--staging-slots"),
    ({"staging_deadline": 0.0}, "--staging-deadline"),
    ({"outer_lr": 1e308}, "--outer-lr"),
    ({"workers": 10**9}, "--workers"),
    ({"sync_every": 2**62}, "--sync-every"),
    ({"quorum": 1, "grace": 1e308}, "--grace"),
    ({"save_every": 10**12}, "--save-every"),
]


@pytest.mark.parametrize(("options", "wrong"), REFUSED, ids=lambda value: str(value)[:60])
def test_bad_configuration_is_refused_in_a_sentence(options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(UsageError) as caught:
        BrokerConfig(**options)
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
def test_what_is_on_the_edge_is_accepted(options: dict[str, Any]) -> None:
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
    ("options", "delay"),
    [
        ({}, 0),
        ({"num_fragments": 4}, "auto"),
        ({"num_fragments": 4, "mode": "async"}, "auto"),
        ({"num_fragments": 4, "deterministic": True}, 0),
        ({"num_fragments": 4, "fragment_sync_delay": 0}, 0),
        ({"num_fragments": 4, "fragment_sync_delay": 3}, 3),
        ({"fragment_sync_delay": "auto"}, "auto"),
    ],
    ids=str,
)
def test_fragments_overlap_unless_a_number_is_given(
    options: dict[str, Any], delay: int | str
) -> None:
    config = BrokerConfig(sync_every=40, **options)
    assert config.fragment_sync_delay == delay
    told = config.run_config
    assert (told.fragment_sync_delay, told.fragment_delay_auto) == (
        (0, True) if delay == "auto" else (delay, False)
    )
    assert config.fewest_steps == config.num_fragments * (told.fragment_sync_delay + 1)


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({"num_fragments": 4}, 10),
        ({"num_fragments": 4, "fragment_max_delay": 25}, 25),
        ({"num_fragments": 40}, 1),
        ({"fragment_sync_delay": "auto"}, 20),
        ({"num_fragments": 4, "fragment_sync_delay": 3}, 3),
        ({}, 0),
    ],
    ids=str,
)
def test_longest_delay_is_the_distance_to_the_next_slot(
    options: dict[str, Any], longest: int
) -> None:
    assert BrokerConfig(sync_every=40, **options).longest_delay == longest


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
def test_whole_submissions_are_kept_where_an_option_needs_them(
    options: dict[str, Any], why: str
) -> None:
    config = BrokerConfig(**options)
    reducer = mode_of(config)
    assert (reducer.asked_for_by(config), reducer.needs_whole) == (why, bool(why))
