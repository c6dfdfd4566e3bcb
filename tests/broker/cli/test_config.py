"""Options that cannot work together are refused with one sentence that names the values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diloco_broker import BrokerConfig
from diloco_broker.core.rules.reducers import reducer_of
from diloco_protocol import UsageError
from diloco_protocol.fragments import PATTERNS

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mode": "both"}, "--mode is both; it must be sync or async."),
    ({"workers": 0}, "--workers is 0; it must be a whole number, from 1 to 10000."),
    ({"workers": 2.5}, "--workers is 2.5; it must be a whole number, from 1 to 10000."),
    ({"workers": True}, "--workers is True; it must be a whole number, from 1 to 10000."),
    ({"bind": "localhost:"}, "--bind is 'localhost:'; it must be an address like"),
    ({"bind": "tcp://127.0.0.1:99999"}, "--bind is 'tcp://127.0.0.1:99999'; it must be an address"),
    ({"bind": "tcp://[::1:5"}, "--bind is 'tcp://[::1:5'; it must be an address like"),
    ({"feed": "tcp://::1:5"}, "--feed is 'tcp://::1:5'; it must be an address like"),
    (
        {"workers": 2, "min_workers": 3},
        "--min-workers is 3; it must be at most --workers, which is",
    ),
    ({"outer_lr": float("nan")}, "--outer-lr is nan; it must be above 0, at most 10."),
    (
        {"wire_dtype": "int3"},
        "--wire-dtype is int3; it must be fp32, bf16, fp16, int8, int4, int4z or top64.",
    ),
    (
        {"reply_dtype": "int2"},
        "--reply-dtype is int2; it must be fp32, bf16, fp16, int8, int4 or int4z.",
    ),
    (
        {"heartbeat_timeout": -1},
        "--heartbeat-timeout is -1; it must be from 0 to 2592000 seconds.",
    ),
    ({"workers": 2, "quorum": 3}, "--quorum is 3; it must be at most --workers, which is 2."),
    (
        {"workers": 3, "quorum": 1, "min_workers": 2},
        "--quorum is 1; it must be at least --min-workers, which is 2.",
    ),
    ({"quorum": 0}, "--quorum is 0; it must be a whole number, from 1 to 10000."),
    ({"grace": 3.0}, "--grace is 3.0; it must be left out, or --quorum given"),
    ({"late": "drop"}, "--late is drop; it must be left out, or --quorum given"),
    ({"late": "forget"}, "--late is forget; it must be carry or drop."),
    ({"grace": float("inf")}, "--grace is inf; it must be from 0 to 86400 seconds."),
    (
        {"sync_every": 3, "num_fragments": 4},
        "--sync-every is 3; it must be at least --num-fragments, which is 4",
    ),
    (
        {"sync_every": 10, "num_fragments": 3, "fragment_sync_delay": 3},
        "--fragment-sync-delay is 3; it must be below 3, the steps between two fragments "
        "(--sync-every 10 over --num-fragments 3).",
    ),
    (
        {"fragment_sync_delay": "soon"},
        "--fragment-sync-delay is soon; it must be auto, or a whole number, at least 0.",
    ),
    ({"fragment_sync_delay": 1.5}, "--fragment-sync-delay is 1.5; it must be auto, or a whole"),
    (
        {"num_fragments": 2, "deterministic": True, "fragment_sync_delay": "auto"},
        "--fragment-sync-delay is auto; it must be a number with --deterministic: when a reply",
    ),
    (
        {"sync_every": 10, "fragment_sync_delay": "auto", "fragment_max_delay": 10},
        "--fragment-max-delay is 10; it must be from --fragment-sync-delay, which is 0, to below",
    ),
    ({"fragment_update_alpha": -0.1}, "--fragment-update-alpha is -0.1; it must be in [0, 1]."),
    ({"fragment_update_alpha": 1.1}, "--fragment-update-alpha is 1.1; it must be in [0, 1]."),
    (
        {"fragment_update_alpha": 0.5, "fragment_merge": "rebase"},
        "--fragment-update-alpha is 0.5; it must be left out with --fragment-merge rebase",
    ),
    ({"fragment_merge": "mean"}, "--fragment-merge is mean; it must be alpha or rebase."),
    ({"fragment_pattern": "odd"}, "--fragment-pattern is odd; it must be strided, contiguous"),
    (
        {"sync_every": 10, "fragment_sync_delay": 3, "fragment_max_delay": 2},
        "--fragment-max-delay is 2; it must be from --fragment-sync-delay, which is 3",
    ),
    (
        {"sync_every": 10, "fragment_max_delay": 10},
        "--fragment-max-delay is 10; it must be from --fragment-sync-delay, which is 0, to below",
    ),
    ({"dylu": True}, "--dylu is on; it must be left out, or --mode async given: in rounds"),
    ({"dylu_min_steps": 5}, "--dylu-min-steps is 5; it must be left out, or --mode async given"),
    (
        {"mode": "async", "dylu_min_steps": 5},
        "--dylu-min-steps is 5; it must be left out, or --dylu given.",
    ),
    (
        {
            "mode": "async",
            "dylu": True,
            "dylu_min_steps": 5,
            "num_fragments": 3,
            "fragment_sync_delay": 1,
        },
        "--dylu-min-steps is 5; it must be from 6 (3 fragments x (delay 1 + 1)) to --sync-every",
    ),
    ({"staleness_weight": "poly"}, "--staleness-weight is poly; it must be left out, or --mode"),
    ({"max_staleness": 2}, "--max-staleness is 2; it must be left out, or --mode async given"),
    ({"mode": "async", "workers": 2, "min_workers": 2}, "--min-workers is 2; it must be left out"),
    ({"mode": "async", "quorum": 1}, "--quorum is 1; it must be left out with --mode async"),
    ({"mode": "async", "deterministic": True}, "--deterministic is on; it must be left out"),
    ({"mode": "async", "aggregate": "clip-median-norm"}, "--aggregate is clip-median-norm; it"),
    ({"mode": "async", "weight_by": "tokens"}, "--weight-by is tokens; it must be left out with"),
    (
        {"mode": "async", "aggregate": "trimmed-mean"},
        "--aggregate is trimmed-mean; it must be left",
    ),
    (
        {"aggregate": "max"},
        "--aggregate is max; it must be mean, clip-median-norm, trimmed-mean or",
    ),
    (
        {"max_delta_norm": 0.0},
        "--max-delta-norm is 0.0; it must be auto, or above 0, at most 1e+30.",
    ),
    ({"max_delta_norm": "ten"}, "--max-delta-norm is ten; it must be auto, or above 0"),
    (
        {"max_delta_norm": "auto", "workers": 2},
        "--max-delta-norm is auto; it must be a number with",
    ),
    (
        {"max_delta_norm": 3, "weight_by": "samples"},
        "--weight-by is samples; it must be left out with --max-delta-norm: a worker says itself",
    ),
    ({"trim": 0.1}, "--trim is 0.1; it must be left out, or --aggregate trimmed-mean given."),
    ({"aggregate": "trimmed-mean", "trim": 0.5}, "--trim is 0.5; it must be in [0, 0.5)."),
    (
        {"aggregate": "coordinate-median", "weight_by": "tokens"},
        "--weight-by is tokens; it must be left out with --aggregate coordinate-median, which counts",
    ),
    ({"weight_by": "age"}, "--weight-by is age; it must be equal, tokens or samples."),
    ({"outer": "adam"}, "--outer is adam; it must be nesterov, dn, fedbuff or sgd."),
    ({"outer_momentum": 1.0}, "--outer-momentum is 1.0; it must be in [0, 1)."),
    ({"outer_momentum": float("nan")}, "--outer-momentum is nan; it must be in [0, 1)."),
    ({"outer_lr": 0.0}, "--outer-lr is 0.0; it must be above 0, at most 10."),
    (
        {"dn_buffer": 4},
        "--dn-buffer is 4; it must be left out, or 1: --outer nesterov has no buffer",
    ),
    (
        {"mode": "async", "workers": 4, "dn_c": 0.3},
        "--dn-c is 0.3; it must be in [0, 1/N], and N is 4 (--dn-buffer).",
    ),
    ({"dn_c": 0.5}, "--dn-c is 0.5; it must be left out: only --outer dn with"),
    (
        {"mode": "async", "workers": 2, "dn_variant": "direct", "dn_c": 0.5},
        "--dn-c is 0.5; it must be left out: only --outer dn with",
    ),
    ({"outer": "sgd", "dn_variant": "direct"}, "--dn-variant is direct; it must be left out"),
    ({"dn_variant": "mine"}, "--dn-variant is mine; it must be paper or direct."),
    ({"staging_slots": 5}, "--staging-slots is 5; it must be left out, or --mode async given"),
    ({"staging_deadline": 5.0}, "--staging-deadline is 5.0; it must be left out, or --mode"),
    (
        {"outer": "sgd", "outer_momentum": 0.5},
        "--outer-momentum is 0.5; it must be left out, or 0: ",
    ),
    (
        {"outer_lr_schedule": "cosine:0"},
        "--outer-lr-schedule is cosine:0; it must be constant, linear:R[:F] or cosine:R[:F], with R "
        "from 1 to 1000000 rounds and F above 0, at most 1.",
    ),
    (
        {"outer_momentum_warmup": "cosine:10:1.0"},
        "--outer-momentum-warmup is cosine:10:1.0; it must be constant, linear:R[:M] or",
    ),
    (
        {"outer": "sgd", "outer_momentum_warmup": "linear:10"},
        "--outer-momentum-warmup is linear:10; it must be left out, or constant: --outer sgd has no",
    ),
    (
        {"fragment_plan": len},
        "--fragment-plan is <built-in function len>; it must be the path of a file,",
    ),
    ({"save_dir": 5}, "--save-dir is 5; it must be the path of a folder."),
    ({"save_dir": ""}, "--save-dir is ''; it must be the path of a folder."),
    ({"resume": None}, "--resume is None; it must be the path of a checkpoint, auto or none."),
    ({"deterministic": "false"}, "--deterministic is 'false'; it must be True or False."),
    ({"staging_slots": 0}, "--staging-slots is 0; it must be a whole number, from 1 to 10000."),
    (
        {"staging_deadline": 0.0},
        "--staging-deadline is 0.0; it must be above 0, at most 2592000 seconds.",
    ),
    ({"outer_lr": 1e308}, "--outer-lr is 1e+308; it must be above 0, at most 10."),
    ({"workers": 10**9}, "--workers is 1000000000; it must be a whole number, from 1 to 10000."),
    (
        {"sync_every": 2**62},
        "--sync-every is 4611686018427387904; it must be a whole number, from 1",
    ),
    ({"quorum": 1, "grace": 1e308}, "--grace is 1e+308; it must be from 0 to 86400 seconds."),
    ({"save_every": 10**12}, "--save-every is 1000000000000; it must be a whole number, from 1 to"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=lambda value: str(value)[:60])
def test_bad_configuration_is_refused_with_one_sentence(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        BrokerConfig(**options)
    assert str(caught.value).startswith(sentence)
    assert str(caught.value).endswith(".")


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
    ],
    ids=str,
)
def test_what_is_on_the_edge_is_accepted(options: dict[str, Any]) -> None:
    BrokerConfig(**options)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("fixed", [{"fragment_merge": "rebase"}, {"fragment_update_alpha": 0.5}])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_sweep_over_fragments_needs_no_special_case(
    pieces: int, pattern: str, fixed: dict[str, Any], mode: str
) -> None:
    for delay in (0, 2, "auto"):
        for longest in (2, None):
            config = BrokerConfig(
                mode=mode,
                num_fragments=pieces,
                fragment_pattern=pattern,
                fragment_sync_delay=delay,
                fragment_max_delay=longest,
                **fixed,
            )
            assert config.fragment_pattern == pattern


@pytest.mark.parametrize("outer", ["nesterov", "dn", "fedbuff", "sgd"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_sweep_over_optimizers_needs_no_special_case(outer: str, nesterov: bool) -> None:
    config = BrokerConfig(outer=outer, outer_momentum=0.0, nesterov=nesterov, dn_buffer=1)
    assert (config.outer_name, config.dn_size) == (outer, 1)
    for quorum in (1, 2, 4, None):
        BrokerConfig(outer=outer, workers=4, quorum=quorum, deterministic=True)


def test_paths_are_kept_as_text_since_checkpoints_hold_the_options() -> None:
    paths = {name: Path("a") / name for name in ("save_dir", "resume", "audit", "fragment_plan")}
    config = BrokerConfig(**paths)  # type: ignore[arg-type]
    assert {name: getattr(config, name) for name in paths} == {n: str(p) for n, p in paths.items()}


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
def test_fragments_overlap_with_training_unless_a_number_is_given(
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
def test_training_waits_for_a_reply_after_the_distance_to_the_next_slot(
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
def test_whole_submissions_are_kept_only_where_an_option_needs_them(
    options: dict[str, Any], why: str
) -> None:
    config = BrokerConfig(**options)
    reducer = reducer_of(config)
    assert (reducer.asked_for_by(config), reducer.needs_whole) == (why, bool(why))
