"""The model as a Hugging Face folder: like the one that was fine-tuned, with the run's values."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from diloco_broker.cli.app import app
from diloco_broker.storage import checkpoint
from diloco_broker.storage.model_file import model_of, write_model
from diloco_broker.storage.model_folder import write_like
from diloco_protocol.errors import UsageError
from kit.checkpoints import a_checkpoint


def a_model(**others: Tensor) -> dict[str, Tensor]:
    embedding = torch.arange(6.0).reshape(3, 2)
    return {
        "embed.weight": embedding,
        "head.bias": torch.ones(3),
        "head.weight": embedding,
    } | others


@pytest.fixture
def like(tmp_path: Path) -> Path:
    """Of two files, in bf16 and fp32; the head is tied, and so not in them."""
    folder = tmp_path / "like"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "any"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"old values")
    one = {"embed.weight": torch.zeros(3, 2, dtype=torch.bfloat16)}
    save_file(one, folder / "model-00001-of-00002.safetensors")
    save_file({"head.bias": torch.zeros(3)}, folder / "model-00002-of-00002.safetensors")
    places = {
        "embed.weight": "model-00001-of-00002.safetensors",
        "head.bias": "model-00002-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """Of one file."""
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    values = {"embed.weight": torch.zeros(3, 2), "head.bias": torch.zeros(3)}
    save_file(values, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("is_one_file", [True, False])
def test_files_of_a_former_model_go(
    like: Path, one: Path, tmp_path: Path, is_one_file: bool
) -> None:
    """from_pretrained would load model.safetensors of before, or an index of files of before."""
    to = tmp_path / "new"
    before, after = (like, one) if is_one_file else (one, like)
    write_like(a_model(), to, before)
    for name in ("notes.txt", "model-00009-of-00009.safetensors", "other.safetensors"):
        (to / name).write_text("mine")
    write_like(a_model(), to, after)
    left = {path.name for path in to.iterdir() if path.read_bytes() != b"mine"}
    assert {name for name in left if name.startswith("model")} == {
        path.name for path in after.iterdir() if path.name.startswith("model")
    }
    assert len(list(to.iterdir())) == len(left) + 3


def test_pieces_of_a_former_model_stay_where_ours_cannot_be_written(
    like: Path, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "new"
    write_like(a_model(), to, like)

    def disk_is_full(*_: object) -> int:
        raise OSError("no space left")

    monkeypatch.setattr("diloco_broker.storage.model_folder.write_model", disk_is_full)
    with pytest.raises(OSError, match="no space"):
        write_like(a_model(), to, one)
    assert len(list(to.glob("model-0000*-of-00002.safetensors"))) == 2


def test_folder_has_our_values_in_its_own_files_and_dtypes(like: Path, tmp_path: Path) -> None:
    to = tmp_path / "new"
    size = write_like(a_model(), to, like)
    assert sorted(path.name for path in to.iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    files = sorted(to.glob("*.safetensors"))
    assert size == sum(path.stat().st_size for path in files)
    embedding, bias = load_file(files[0])["embed.weight"], load_file(files[1])["head.bias"]
    assert embedding.dtype == torch.bfloat16
    assert torch.equal(embedding.float(), a_model()["embed.weight"])
    assert torch.equal(bias, a_model()["head.bias"])
    with safe_open(files[0], "pt") as opened:
        assert opened.metadata() == {"format": "pt"}, "transformers insists on it"


def test_of_a_folder_of_adapters_the_adapters_are_written(tmp_path: Path) -> None:
    like, to = tmp_path / "like", tmp_path / "new"
    like.mkdir()
    (like / "adapter_config.json").write_text("{}")
    save_file({"q.lora_A.weight": torch.zeros(2)}, like / "adapter_model.safetensors")
    write_like(a_model(**{"q.lora_A.default.weight": torch.ones(2)}), to, like)
    written = load_file(to / "adapter_model.safetensors")
    assert list(written) == ["q.lora_A.weight"] and torch.equal(
        written["q.lora_A.weight"], torch.ones(2)
    )


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"embed.weight": torch.ones(3, 2)}, "head.bias"),
        (a_model(**{"head.bias": torch.ones(4)}), r"\(3,\).*\(4,\)"),
        (a_model(other=torch.full((2,), 7.0)), "other"),
    ],
)
def test_folder_of_another_model_is_refused_and_nothing_is_written(
    model: dict[str, Tensor], said: str, like: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        write_like(model, tmp_path / "new", like)
    assert not (tmp_path / "new").exists()


def test_folder_that_is_not_of_hugging_face_is_refused(like: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="same folder"):
        write_like(a_model(), like, like)
    (like / "model-00001-of-00002.safetensors").write_bytes(b"no header")
    with pytest.raises(UsageError, match="safetensors"):
        write_like(a_model(), tmp_path / "new", like)
    (like / "config.json").unlink()
    with pytest.raises(UsageError, match=r"config\.json"):
        write_like(a_model(), tmp_path / "new", like)


def test_command_makes_the_folder_and_replaces_none_that_is_not_empty(tmp_path: Path) -> None:
    run, like, to = tmp_path / "run", tmp_path / "like", tmp_path / "new"
    made = a_checkpoint(5)
    checkpoint.save(run, made, keep=1)
    like.mkdir()
    (like / "config.json").write_text("{}")
    write_model(model_of(made), like / "model.safetensors")

    def export(*options: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["export", str(run), "--like", str(like), *options])
        return result.exit_code, result.output

    code, said = export()
    assert (code, said.count("\n"), "--to" in said) == (2, 1, True)
    code, said = export("--to", str(to))
    assert (code, "new: " in said) == (0, True), said
    assert load_file(to / "model.safetensors").keys() == model_of(made).keys()
    code, said = export("--to", str(to))
    assert code == 2 and "--force" in said
    assert export("--to", str(to), "--force")[0] == 0
    (tmp_path / "file").touch()
    assert export("--to", str(tmp_path / "file"), "--force")[0] == 2
