"""A user's own split of the model: a file of names and patterns, or a function; its runs and resumes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from diloco_broker import Broker
from diloco_broker.storage.checkpoint import found, load
from diloco_protocol import FragmentPlan, Kind, Manifest, UsageError
from diloco_protocol.clients import Operator
from diloco_protocol.fragments import OwnSplit
from diloco_worker import DiLoCoClient
from kit.manifests import gpt2, model, tensor
from kit.whole_run import LAYERS, PATIENCE_S, make_config, mlp

# A split of `mlp` that no pattern gives: the layer in the middle by itself.
OWN = {"[04].*": 0, "2.weight": 1, "2.bias": 1}
FRAGMENTS = [[*LAYERS[0], *LAYERS[2]], LAYERS[1]]
TWO_AND_ONE = {"0.*": 0, "2.*": 0, "4.*": 1}
STREAMING: dict[str, Any] = {"workers": 2, "sync_every": 6, "num_fragments": 2}


def split_of(fragments: Mapping[str, Any]) -> OwnSplit:
    return OwnSplit.from_json(json.dumps(fragments), "--fragment-plan own.json")


def a_file(folder: Path, fragments: Mapping[str, Any] = OWN, name: str = "own.json") -> str:
    path = folder / name
    path.write_text(json.dumps(fragments))
    return str(path)


def by_layer(name: str, shape: tuple[int, ...]) -> int:
    assert name.startswith(("0.", "2.", "4.")) and len(shape) in (1, 2)
    return int(name.startswith("2."))


def test_each_parameter_is_in_the_fragment_of_its_pattern() -> None:
    split = split_of(
        {"*.wte.*": 0, "*.wpe.*": 1, "transformer.h.[0-2].*": 2, "*.h.[345].*": 1, "*ln_f*": 2}
    )
    plan = split.plan(gpt2(6))
    assert plan.num_fragments == split.num_fragments == 3
    assert plan.fragments[0] == ("transformer.wte.weight",)
    assert plan.fragments[1][0] == "transformer.wpe.weight"
    assert {name.split(".")[2] for name in plan.fragments[1][1:]} == {"3", "4", "5"}
    assert plan.fragments[2][-2:] == ("transformer.ln_f.weight", "transformer.ln_f.bias")


@pytest.mark.parametrize(
    ("fragments", "words"),
    [
        ({"a.*": 0}, "has no pattern for 2 trainable parameter(s): b.weight"),
        ({"*": 0, "b.weight": 1}, "1 parameter(s) more than once: b.weight by '*' and 'b.weight'"),
        ({"a.*": 0, "b.*": 0, "c.*": 0}, "1 pattern(s) that match no trainable parameter: 'c.*'"),
        ({"?.*": 0, "tied": 0}, "match no trainable parameter: 'tied' (tied to a.weight)"),
        ({"?.*": 0, "run*": 0}, "'run*' (running is a buffer tensor)"),
        ({"?.weight": 0, "?.bias": 0, "n*": 1}, "leaves fragment 1 without trainable elements"),
    ],
)
def test_file_that_does_not_fit_names_parameters(fragments: dict[str, int], words: str) -> None:
    entries = list(model(a__weight=4, a__bias=2, b__weight=4, b__bias=2).entries)
    entries[0] = type(entries[0])("a.weight", (4,), "float32", Kind.TRAINABLE, aliases=("tied",))
    if "n*" in fragments:
        entries.append(tensor("none", 0))
    manifest = Manifest((*entries, tensor("running", 3, kind=Kind.BUFFER)))
    with pytest.raises(UsageError) as caught:
        split_of(fragments).plan(manifest)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "own.json is not JSON: "),
        ("[" * 100_000, "own.json is not JSON: "),
        ("[1]", "must hold an object like"),
        ("{}", "must hold an object like"),
        ('{"a": 0, "b": 1.5, "c": -1, "d": true}', "'b' has 1.5"),
        ('{"a": 0, "b": 2}', "has a fragment 2 but no fragment 1"),
        ('{"a": 1000000000000}', "but no fragment 0"),
        ('{"a": 0, "b": 0, "a": 1}', "has a more than once"),
    ],
)
def test_malformed_split_file_is_refused_with_one_sentence(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        OwnSplit.from_json(text, "--fragment-plan own.json")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda name, shape: 2, "puts a.weight in 2"),
        (lambda name, shape: 0, "leaves fragment 1 without"),
        (lambda name, shape: None, "for a.weight [4]; it must return an integer"),
        (lambda name, shape: {}[name], "KeyError('a.weight')"),
    ],
)
def test_unsuitable_split_function_is_refused_with_one_sentence(choose: Any, words: str) -> None:
    manifest = model(a__weight=4, a__bias=2, b__weight=4, b__bias=2)
    with pytest.raises(UsageError) as caught:
        FragmentPlan.by(manifest, 2, choose)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "function", "words"),
    [
        ({"fragment_plan": "/none.json"}, None, "--fragment-plan /none.json cannot be read: No su"),
        ({"num_fragments": 3}, None, "has 2 fragments, but --num-fragments is 3"),
        ({"fragment_pattern": "balanced"}, None, "must be omitted with --fragment-plan"),
        ({}, by_layer, "remove one of them"),
    ],
)
def test_options_that_contradict_the_file_stop_the_start(
    tmp_path: Path, options: dict[str, Any], function: Any, words: str
) -> None:
    made = {**STREAMING, "fragment_plan": a_file(tmp_path), **options}
    with pytest.raises(UsageError, match=words):
        Broker(make_config(**made), fragment_plan=function)


def one_round(folder: Path, choose: Any = None, **options: Any) -> FragmentPlan:
    """A broker that makes a version of each fragment; returns the plan of the run."""
    config = make_config(**{**STREAMING, "workers": 1, **options}, save_dir=folder)
    with (
        Broker(config, fragment_plan=choose) as broker,
        DiLoCoClient(broker.address, worker_id="w", timeout=PATIENCE_S) as client,
    ):
        start = dict(client.join(mlp()).tensors)
        with Operator(broker.address) as operator:
            numbers = operator.ask("manifest").data["plan"]
            shown = operator.ask("status").data["fragment_pattern"]
        parts = [
            tuple(n for n, k in zip(start, numbers, strict=True) if k == part) for part in (0, 1)
        ]
        plan = FragmentPlan(2, tuple(parts))
        for fragment, names in enumerate(plan.fragments):
            client.push({name: 0 * start[name] + 1 for name in names}, fragment=fragment)
            client.pull()
    is_own = choose is not None or "fragment_plan" in options
    assert shown == ("own" if is_own else options.get("fragment_pattern", "strided"))
    return plan


def test_own_split_survives_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    path = a_file(tmp_path)
    plans = [
        one_round(folder, fragment_plan=path),
        one_round(folder, by_layer),  # the same split, said otherwise
        one_round(folder, fragment_plan=a_file(tmp_path, {"[04]*": 0, "2*": 1}, "other.json")),
    ]
    assert [list(map(list, plan.fragments)) for plan in plans] == [FRAGMENTS] * 3
    newest = load(found(folder)[0])
    assert (newest.number, newest.config["fragment_pattern"]) == (6, "own")


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        (TWO_AND_ONE, "strided", "--fragment-pattern strided splits .* 4.weight in fragment"),
        (TWO_AND_ONE, {"0.*": 0, "[24].*": 1}, r"then.json .* 2.weight in fragment 1 instead of 0"),
        ("strided", "contiguous", "give --fragment-pattern strided, or --resume none"),
    ],
)
def test_another_split_than_the_checkpoints_is_refused(
    tmp_path: Path, first: dict[str, int] | str, then: dict[str, int] | str, words: str
) -> None:
    """Each is a pattern, or what a file holds."""
    options = [
        {"fragment_pattern": split}
        if isinstance(split, str)
        else {"fragment_plan": a_file(tmp_path, split, name)}
        for split, name in ((first, "first.json"), (then, "then.json"))
    ]
    one_round(tmp_path / "run", **options[0])
    with pytest.raises(UsageError, match=words) as caught:
        one_round(tmp_path / "run", **options[1])
    if first == TWO_AND_ONE:
        again = "give the same --fragment-plan, or --resume none to start a new run"
        assert again in str(caught.value)
