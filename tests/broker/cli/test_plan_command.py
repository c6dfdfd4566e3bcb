"""What a fragment plan means to people: `FragmentPlan.view`, `diloco-broker plan` of models and runs."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from diloco_broker import Broker
from diloco_broker.cli.app import app
from diloco_protocol import FragmentPlan, Kind, Manifest, lay_out
from diloco_protocol.dtypes import span_bytes
from diloco_protocol.fragments import PATTERNS, slots
from diloco_worker import DiLoCoClient
from kit.manifests import MODELS, tensor
from kit.whole_run import PATIENCE_S, make_config, mlp

LAYERS = 12
WIDTH = 8


def planned(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def as_json(*arguments: object) -> Any:
    return json.loads(planned(*arguments, "--json"))


def llama_state(vocabulary: int = 40) -> dict[str, Tensor]:
    """Twelve layers, so that sorting by text would put layers.10 before layers.2."""
    state = {"model.embed_tokens.weight": torch.zeros(vocabulary, WIDTH)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for x in "qkvo":
            state[f"{layer}.self_attn.{x}_proj.weight"] = torch.zeros(WIDTH, WIDTH)
        state[f"{layer}.input_layernorm.weight"] = torch.zeros(WIDTH)
    state["model.norm.weight"] = torch.zeros(WIDTH)
    return {**state, "lm_head.weight": torch.zeros(vocabulary, WIDTH)}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", MODELS)
def test_view_has_the_bytes_that_travel_and_the_steps_that_are_due(name: str, pattern: str) -> None:
    extra = (tensor("running_mean", 5, kind=Kind.BUFFER), tensor("frozen", 7, kind=Kind.FROZEN))
    manifest = Manifest((*MODELS[name].entries, *extra))
    pieces, every = 3, 10
    plan = FragmentPlan.of(manifest, pieces, pattern)
    view = plan.view(manifest, every, "fp16", "fp32")
    layout = lay_out(manifest, plan.fragment_of, num_fragments=pieces, chunk_elements=16)
    for each, part in zip(view.fragments, layout.fragments, strict=True):
        assert tuple(p.name for p in each.parameters) == plan.fragments[each.fragment]
        assert each.bytes_up == sum(span_bytes(s, "fp16") for s in part.spans)
        assert each.bytes_down == sum(span_bytes(s, "fp32") for s in part.spans)
        assert each.due == slots(every, pieces)[each.fragment]
    assert sum(each.elements for each in view.fragments) == manifest.trainable_elements
    assert 1 <= view.imbalance <= pieces


def test_every_kind_of_model_file_gives_the_same_plan(tmp_path: Path) -> None:
    state = llama_state()
    save_file(state, tmp_path / "llama.safetensors")
    torch.save(state, tmp_path / "llama.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    folder = tmp_path / "hub"
    folder.mkdir()
    parts = [dict(list(state.items())[:20]), dict(list(state.items())[20:])]
    for number, part in enumerate(parts):
        save_file(part, folder / f"model-{number}.safetensors")
    index = {
        name: f"model-{number}.safetensors" for number, part in enumerate(parts) for name in part
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    def fragments(name: str) -> list[set[str]]:
        told = as_json(tmp_path / name, "--num-fragments", 3)
        return [{each["name"] for each in part["parameters"]} for part in told["fragments"]]

    wanted = fragments("llama.pt")
    assert set().union(*wanted) == set(state)
    assert "lm_head.weight" in wanted[(LAYERS - 1) % 3]
    assert {f"model.layers.{i}.input_layernorm.weight" for i in (1, 4, 7, 10)} <= wanted[1]
    for name in ("llama.safetensors", "old.pt", "hub"):
        assert fragments(name) == wanted, name


def test_tied_weights_count_once_and_buffers_and_frozen_ones_do_not(tmp_path: Path) -> None:
    state = llama_state()
    trained = sum(each.numel() for each in state.values())
    head = state["lm_head.weight"] = state["model.embed_tokens.weight"]
    buffers = {"bn.running_var": torch.ones(3), "bn.num_batches_tracked": torch.tensor(4)}
    torch.save({**state, **buffers}, tmp_path / "model.pt")
    told = as_json(tmp_path / "model.pt", "--num-fragments", 2, "--frozen", "model.layers.0.*")
    frozen = 4 * WIDTH * WIDTH + WIDTH
    assert told["trainable_parameters"] == trained - head.numel() - frozen
    names = {each["name"] for part in told["fragments"] for each in part["parameters"]}
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    up = sum(part["bytes_up"] for part in told["fragments"])
    assert up == 2 * told["trainable_parameters"] + 4 * 3 + 8 * 1


def test_only_the_header_of_a_file_is_read(tmp_path: Path) -> None:
    """A file of 160 GB, none of which is there."""
    each = 40 * 10**9
    header, names = {}, [f"model.layers.{i}.weight" for i in range(4)]
    for i, name in enumerate(names):
        offsets = [i * each, (i + 1) * each]
        header[name] = {"dtype": "BF16", "shape": [each // 2], "data_offsets": offsets}
    raw = json.dumps(header).encode()
    path = tmp_path / "huge.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + 4 * each)
    shown = planned(path, "--num-fragments", 2, "--sync-every", 1000)
    assert "80,000,000,000" in shown and "160 GB" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_uneven_split_is_told_a_better_pattern_and_number_of_fragments(tmp_path: Path) -> None:
    torch.save(llama_state(vocabulary=300), tmp_path / "model.pt")
    told = as_json(tmp_path / "model.pt", "--num-fragments", 6)
    assert told["imbalance"] > 1.5
    advice = " ".join(told["advice"])
    assert "contiguous" in advice and "1.81" in advice and "3" in advice
    even = as_json(tmp_path / "model.pt", "--num-fragments", 2, "--fragment-pattern", "balanced")
    assert even["imbalance"] < 1.01
    for options in ((12, "--fragment-pattern", "balanced"), (1,), (12,)):
        words = ("--num-fragments", *options, "--sync-every", 10**6)
        lines = planned(tmp_path / "model.pt", *words).splitlines()
        assert max(map(len, lines)) <= 80
        rows = [line.split() for line in lines if line[:8].strip().isdigit() and "%" in line]
        assert [row[0] for row in rows] == [str(number) for number in range(options[0])]


def test_split_of_ones_own_is_shown(tmp_path: Path) -> None:
    torch.save(llama_state(), tmp_path / "model.pt")
    split = tmp_path / "split.json"
    split.write_text('{"model.[en]*": 1, "lm_head*": 1, "model.layers.*": 0}')
    told = as_json(tmp_path / "model.pt", "--fragment-plan", split)
    assert (told["num_fragments"], told["pattern"]) == (2, "own")
    assert len(told["fragments"][1]["parameters"]) == 3
    split.write_text('{"model.*": 0}')
    shown = planned(tmp_path / "model.pt", "--fragment-plan", split, code=2)
    assert "lm_head.weight" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere.pt"],
        ["model.pt", "--num-fragments", "0"],
        ["model.pt", "--num-fragments", "900"],
        ["model.pt", "--fragment-pattern", "odd"],
        ["model.pt", "--frozen", "x*"],
        ["model.pt", "--frozen", "*"],
        ["bad.safetensors"],
        ["list.pt"],
        ["."],
        ["model.pt", "--fragment-plan", "none.json"],
        ["model.pt", "--fragment-plan", "s.json", "--fragment-pattern", "strided"],
        ["model.pt", "--fragment-plan", "s.json", "--num-fragments", "3"],
    ],
)
def test_bad_plan_is_one_line_and_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(llama_state(), "model.pt")
    torch.save([1, 2], "list.pt")
    Path("bad.safetensors").write_bytes(b"\xff" * 20)
    Path("s.json").write_text('{"*": 0}')
    shown = planned(*arguments, code=2)
    assert shown.count("\n") == 1, shown


def test_plan_of_a_run_is_shown_from_its_broker_and_from_its_checkpoints(tmp_path: Path) -> None:
    model: nn.Module = mlp()
    model[1].weight = nn.Parameter(torch.zeros(3), requires_grad=False)  # type: ignore[index]
    config = make_config(sync_every=8, num_fragments=2, save_dir=str(tmp_path), reply_dtype="bf16")
    with (
        Broker(config, fragment_plan=lambda name, shape: name[0] == "2") as broker,
        DiLoCoClient(broker.address, worker_id="w", timeout=PATIENCE_S) as client,
    ):
        start = dict(client.join(model).tensors)
        live = as_json(broker.address)
        client.push({name: 0 * start[name] for name in start if name[0] in "04"}, fragment=0)
        client.pull()
        other = as_json(broker.address, "--fragment-pattern", "balanced", "--sync-every", 20)
    saved = as_json(tmp_path)
    for told in (live, saved):
        assert (told["pattern"], told["sync_every"], told["wire_dtype"]) == ("own", 8, "fp32")
        assert told["reply_dtype"] == "bf16"
        assert told["trainable_parameters"] == 83
        first, second = told["fragments"]
        assert [each["name"] for each in second["parameters"]] == ["2.weight", "2.bias"]
        assert (first["due"], second["due"]) == (4, 8)
        assert (second["bytes_up"], second["bytes_down"]) == (4 * 35, 2 * 35)
    assert (other["pattern"], other["num_fragments"], other["sync_every"]) == ("balanced", 2, 20)
    assert "--frozen is for model files" in planned(tmp_path, "--frozen", "*", code=2)
