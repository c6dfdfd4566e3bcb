"""A run that outer momentum often harms, because it is short or trains adapters, gets one warning."""

from typing import Any

import pytest

from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from kit.core_harness import Stage, a_config, a_round, a_run

SIZE = (8,)


def advice(stage: Stage) -> list[str]:
    return stage.said("--preset finetune")


def entry(name: str, kind: Kind = Kind.TRAINABLE) -> TensorEntry:
    return TensorEntry(name, SIZE, "float32", kind)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_rounds": 20}, "about 20 rounds"),
        ({"max_rounds": 50}, None),
        ({"max_rounds": 98, "num_fragments": 2}, "about 49 rounds"),
        ({"max_rounds": 98, "mode": "async"}, "about 49 rounds"),
        ({"max_rounds": 20, "outer": "sgd"}, None),
        ({"max_rounds": 20, "outer_momentum": 0.0}, None),
    ],
    ids=str,
)
def test_short_run_with_momentum_is_warned(options: dict[str, Any], said: str | None) -> None:
    stage, puppets = a_run("a", "b", rounds=0, **options)
    assert len(advice(stage)) == (said is not None)
    a_round(puppets, 0)
    assert [said in line for line in advice(stage) if said] == [True] * (said is not None)


@pytest.mark.parametrize(("budget", "warns"), [(49 * 20, True), (50 * 20, False)])
def test_token_budget_is_known_as_rounds_after_the_first_cycle(budget: int, warns: bool) -> None:
    stage, (a, b) = a_run("a", "b", rounds=0, token_budget=budget, num_fragments=2)
    for fragment in range(2):
        assert not advice(stage)
        a.pushes(10 * fragment + 1, fragment=fragment, tokens=10)
        b.pushes(10 * fragment + 2, fragment=fragment, tokens=10)
    assert len(advice(stage)) == warns


@pytest.mark.parametrize(
    ("others", "warns"),
    [
        ([], True),
        ([entry("base.embedding", Kind.FROZEN), entry("layers.0.adapter_down.weight")], True),
        ([entry("head.weight")], False),
    ],
    ids=str,
)
def test_run_that_trains_adapters_only_is_warned_of(others: list[TensorEntry], warns: bool) -> None:
    entries = (*others, entry("layers.0.q_proj.lora_A.default.weight"))
    stage = Stage(a_config(1), Manifest(entries))
    stage.joined("a")
    assert bool(stage.said("trains adapters only", "--preset finetune")) == warns
