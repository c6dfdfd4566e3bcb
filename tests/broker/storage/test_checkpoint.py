"""Checkpoints on disk: whole or not at all, found again, never believed when damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diloco_broker.storage import checkpoint, safetensors_writer
from diloco_broker.storage.checkpoint import Damaged, FragmentImage, Image
from diloco_protocol.chunks import lay_out
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.version import Counted, Ledger, VersionId

RUN = "0123456789abcdef"
MANIFEST = Manifest(
    (
        TensorEntry("a.weight", (5, 3), "float32", Kind.TRAINABLE, ("tied",)),
        TensorEntry("b.weight", (7,), "bfloat16", Kind.TRAINABLE),
        TensorEntry("mean", (3,), "float32", Kind.BUFFER),
        TensorEntry("count", (), "int64", Kind.BUFFER),
        TensorEntry("table", (4,), "float32", Kind.FROZEN),
    )
)
PLAN = (0, 1, 1, 1, 2)


def an_image(number: int = 4, seed: int = 0) -> Image:
    """Two fragments and the frozen one, in chunks of four elements, with some outer state."""
    torch.manual_seed(seed)
    of = dict(zip((e.name for e in MANIFEST.entries), PLAN, strict=True))
    layout = lay_out(MANIFEST, of, num_fragments=2, chunk_elements=4)
    fragments = {}
    for part in layout.all:
        chunks = [
            torch.randint(0, 9, (s.elements,))
            if s.segment.value == "integers"
            else torch.randn(s.elements)
            for s in part.spans
        ]
        momentum = [
            torch.randn(s.elements) if s.segment.value == "parameters" and s.index != 1 else None
            for s in part.spans
        ]
        fragments[part.fragment] = FragmentImage(
            VersionId(RUN, number + part.fragment, 2**64 - 1 - seed),
            Ledger({"w": (Counted(1), Counted(2**64 - 1, b"\x05"))}),
            gradients=number,
            round=number - 1,
            averaged=2,
            chunks=chunks,
            outer={"momentum": momentum} if part is not layout.frozen else {},
            tags={number - 1: 2**64 - 1, number: seed},
        )
    return Image(
        RUN,
        number,
        2,
        MANIFEST,
        PLAN,
        2,
        4,
        "nesterov",
        fragments,
        "e" * 16,
        {"w": {"pushes": 3}, "x": {"pushes": 0}},
        {"outer_lr": 0.7},
        {"rounds": 4},
    )


def assert_equal(ours: Image, theirs: Image) -> None:
    assert replace(ours, fragments={}) == replace(theirs, fragments={})
    assert ours.fragments.keys() == theirs.fragments.keys()
    for fragment, a in ours.fragments.items():
        b = theirs.fragments[fragment]
        for name in ("version", "ledger", "gradients", "round", "averaged", "tags"):
            assert getattr(a, name) == getattr(b, name)
        assert all(torch.equal(x, y) for x, y in zip(a.chunks, b.chunks, strict=True))
        assert a.outer.keys() == b.outer.keys()
        for name in a.outer:
            for x, y in zip(a.outer[name], b.outer[name], strict=True):
                assert (x is None and y is None) or torch.equal(x, y)  # type: ignore[arg-type]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    image = an_image()
    path = checkpoint.save(tmp_path / "run", image, keep=3)
    assert path.name == "checkpoint-0002-000000000004"
    assert_equal(checkpoint.load(path), image)


def test_state_of_a_torch_optimizer_survives(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(5, 3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.randn(5, 3)
    optimizer.step()
    image = an_image()
    first = replace(image.fragments[0], optimizer=optimizer.state_dict())
    image = replace(image, fragments={**image.fragments, 0: first})
    loaded = checkpoint.load(checkpoint.save(tmp_path, image, keep=1)).fragments[0].optimizer
    again = torch.optim.AdamW([weight], lr=0.5)
    assert loaded is not None
    again.load_state_dict(dict(loaded))
    for name, value in optimizer.state[weight].items():
        assert torch.equal(again.state[weight][name], value)
    assert again.param_groups[0]["lr"] == 0.1


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    image = an_image()
    path = checkpoint.save(tmp_path, image, keep=1)
    tensors = load_file(path / "fragment-1.safetensors")
    assert set(tensors) == {"parameters", "buffers", "integers", "outer.momentum"}
    assert torch.equal(tensors["parameters"], torch.cat(list(image.fragments[1].chunks[:2])))
    assert tensors["integers"].dtype == torch.int64


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for number in range(1, 6):
        checkpoint.save(tmp_path, an_image(number, seed=number), keep=3)
    names = [path.name[-2:] for path in checkpoint.found(tmp_path)]
    assert names == ["05", "04", "03"]
    assert len(list(tmp_path.iterdir())) == 3


def test_fragment_that_has_not_changed_is_linked_not_written_again(tmp_path: Path) -> None:
    first = an_image(4)
    one = checkpoint.save(tmp_path, first, keep=2)
    fresh = an_image(5, seed=1)
    second = replace(first, number=5, fragments={**first.fragments, 0: fresh.fragments[0]})
    two = checkpoint.save(tmp_path, second, keep=2)

    def inode(path: Path, fragment: int) -> int:
        return (path / f"fragment-{fragment}.safetensors").stat().st_ino

    assert [inode(one, f) == inode(two, f) for f in range(3)] == [False, True, True]
    checkpoint.save(tmp_path, replace(second, number=6), keep=1)
    assert_equal(checkpoint.load(checkpoint.found(tmp_path)[0]), replace(second, number=6))


def test_file_cut_or_changed_at_any_place_is_noticed(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, an_image(), keep=1)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for at in (*range(0, len(whole), max(1, len(whole) // 40)), len(whole) - 1):
            for broken in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
                file.write_bytes(broken)
                with pytest.raises(Damaged, match="checkpoint-"):
                    checkpoint.load(path)
        file.write_bytes(whole)
    checkpoint.load(path)


@pytest.mark.parametrize("name", ["fragment-0.safetensors", "checkpoint.json"])
def test_file_that_is_missing_is_noticed(tmp_path: Path, name: str) -> None:
    path = checkpoint.save(tmp_path, an_image(), keep=1)
    (path / name).unlink()
    with pytest.raises(Damaged, match=name.split("-", maxsplit=1)[0]):
        checkpoint.load(path)


def test_other_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, an_image(), keep=1)
    body = checkpoint.read_manifest(path)
    body["format"] = 99
    text = json.dumps({"sha256": checkpoint._sum_of(body), "checkpoint": body})
    (path / "checkpoint.json").write_text(text)
    with pytest.raises(Damaged, match="format 99, this release reads 1"):
        checkpoint.load(path)


@pytest.mark.parametrize("files_before_failure", range(4))
def test_save_that_fails_half_way_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_before_failure: int
) -> None:
    image = an_image(4)
    old = checkpoint.save(tmp_path, image, keep=1)
    written = iter(range(100))

    def failing(write: Callable[..., object]) -> Callable[..., object]:
        def attempt(*arguments: object) -> object:
            if next(written) == files_before_failure:
                raise OSError(28, "No space left on device")
            return write(*arguments)

        return attempt

    monkeypatch.setattr(safetensors_writer, "write", failing(safetensors_writer.write))
    monkeypatch.setattr(checkpoint, "_write_manifest", failing(checkpoint._write_manifest))
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, an_image(5, seed=1), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == [old.name]
    assert_equal(checkpoint.load(old), image)


def test_folder_of_a_save_that_was_killed_is_no_checkpoint(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, an_image(), keep=1)
    path.rename(tmp_path / f".{path.name}.1234")
    assert checkpoint.found(tmp_path) == []
    assert checkpoint.found(tmp_path / "nowhere") == []
