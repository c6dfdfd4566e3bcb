"""Checkpoints on disk: whole or not at all, found again, never believed when damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco_broker.core.data.data_sets import DataSets
from diloco_broker.core.versions.record import DataSetRecord
from diloco_broker.storage import checkpoint, checkpoint_format
from diloco_broker.storage.checkpoint import Damaged
from diloco_protocol.data.spans import MOST_RANGES
from kit.checkpoints import a_checkpoint, assert_equal


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    made = a_checkpoint()
    path = checkpoint.save(tmp_path / "run", made, keep=3)
    assert path.name == "checkpoint-0002-000000000004"
    assert_equal(checkpoint.load(path), made)


def test_units_in_more_rows_than_a_message_may_name_are_saved_and_loaded(tmp_path: Path) -> None:
    made = a_checkpoint()
    rows = tuple(range(2 * (MOST_RANGES + 1000)))
    text = DataSetRecord(size=rows[-1] + 1, epochs=1, next=rows[-1] + 1, uncounted=rows)
    made = replace(made, record=replace(made.record, data_sets={"text": text}))
    found = checkpoint.load(checkpoint.save(tmp_path, made, keep=1)).record.data_sets
    assert found["text"] == text
    sets = DataSets()
    sets.restore(found)
    assert sets.records() == found


def test_state_of_a_torch_optimizer_survives(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(5, 3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.randn(5, 3)
    optimizer.step()
    made = a_checkpoint()
    first = replace(made.tensors[0], optimizer=optimizer.state_dict())
    made = replace(made, tensors={**made.tensors, 0: first})
    loaded = checkpoint.load(checkpoint.save(tmp_path, made, keep=1)).tensors[0].optimizer
    again = torch.optim.AdamW([weight], lr=0.5)
    assert loaded is not None
    again.load_state_dict(dict(loaded))
    for name, value in optimizer.state[weight].items():
        assert torch.equal(again.state[weight][name], value)
    assert again.param_groups[0]["lr"] == 0.1


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for number in range(1, 6):
        checkpoint.save(tmp_path, a_checkpoint(number, seed=number), keep=3)
    names = [path.name[-2:] for path in checkpoint.found(tmp_path)]
    assert names == ["05", "04", "03"]
    assert len(list(tmp_path.iterdir())) == 3


def test_fragment_that_has_not_changed_is_linked_not_written_again(tmp_path: Path) -> None:
    first = a_checkpoint(4)
    one = checkpoint.save(tmp_path, first, keep=2)
    fresh = a_checkpoint(5, seed=1)
    newer = {**first.record.fragments, 0: fresh.record.fragments[0]}
    second = replace(
        first,
        record=replace(first.record, number=5, fragments=newer),
        tensors={**first.tensors, 0: fresh.tensors[0]},
    )
    two = checkpoint.save(tmp_path, second, keep=2)

    def inode(path: Path, fragment: int) -> int:
        return (path / f"fragment-{fragment}.safetensors").stat().st_ino

    assert [inode(one, f) == inode(two, f) for f in range(3)] == [False, True, True]
    third = replace(second, record=replace(second.record, number=6))
    checkpoint.save(tmp_path, third, keep=1)
    assert_equal(checkpoint.load(checkpoint.found(tmp_path)[0]), third)


def test_file_cut_or_changed_at_any_place_is_noticed(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, a_checkpoint(), keep=1)
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
    path = checkpoint.save(tmp_path, a_checkpoint(), keep=1)
    (path / name).unlink()
    with pytest.raises(Damaged, match=name.split("-", maxsplit=1)[0]):
        checkpoint.load(path)


def test_other_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, a_checkpoint(), keep=1)
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
    made = a_checkpoint(4)
    old = checkpoint.save(tmp_path, made, keep=1)
    written = iter(range(100))

    def failing(write: Callable[..., object]) -> Callable[..., object]:
        def attempt(*arguments: object) -> object:
            if next(written) == files_before_failure:
                raise OSError(28, "No space left on device")
            return write(*arguments)

        return attempt

    monkeypatch.setattr(checkpoint_format, "save_tensors", failing(checkpoint_format.save_tensors))
    monkeypatch.setattr(checkpoint, "_write_manifest", failing(checkpoint._write_manifest))
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, a_checkpoint(5, seed=1), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == [old.name]
    assert_equal(checkpoint.load(old), made)


def test_folder_of_a_save_that_was_killed_is_no_checkpoint(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, a_checkpoint(), keep=1)
    path.rename(tmp_path / f".{path.name}.1234")
    assert checkpoint.found(tmp_path) == []
    assert checkpoint.found(tmp_path / "nowhere") == []
