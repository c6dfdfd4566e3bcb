"""Checkpoints on disk: whole or not at all, found again, never believed when damaged or hostile."""

import hashlib
import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from diloco_broker import BrokerConfig
from diloco_broker.cli.checkpoint_report import describe
from diloco_broker.core.data.data_sets import DataSets
from diloco_broker.core.versions.record import DataSetRecord
from diloco_broker.storage import checkpoint, checkpoint_format
from diloco_broker.storage.checkpoint import MANIFEST, MOST_JSON_BYTES, Damaged
from diloco_broker.storage.resume import newest_checkpoint
from diloco_protocol.data.spans import MOST_RANGES
from diloco_protocol.errors import UsageError
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
    write_body(path, checkpoint.read_manifest(path) | {"format": 99})
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


def test_folder_of_a_killed_save_is_not_a_checkpoint(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, a_checkpoint(), keep=1)
    path.rename(tmp_path / f".{path.name}.1234")
    assert checkpoint.found(tmp_path) == []
    assert checkpoint.found(tmp_path / "nowhere") == []


# Checkpoints written to do harm: the checksum fits, and the content is impossible.

FILE = "fragment-0.safetensors"


def a_saved(folder: Path) -> Path:
    return checkpoint.save(folder, a_checkpoint(), keep=3)


def write_body(path: Path, body: Any) -> None:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    whole = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "checkpoint": body}
    (path / MANIFEST).write_text(json.dumps(whole))


def is_refused(path: Path) -> str:
    """By all that read its tensors; returns the sentence. `inspect` looks at sums alone."""
    with pytest.raises(Damaged) as refused:
        checkpoint.load(path)
    json.dumps(describe(path, quick=False))
    config = BrokerConfig(num_fragments=2, chunk_elements=4, sync_every=4, resume=str(path))
    with pytest.raises(UsageError):
        newest_checkpoint(config)
    return str(refused.value)


def set_(*place: Any) -> Callable[[Any], None]:
    *way, key, value = place

    def change(body: Any) -> None:
        for each in way:
            body = body[each]
        body[key] = value

    return change


HOSTILE = {
    "a fragment list": set_("fragments", []),
    "no number": set_("number", float("inf")),
    "a negative number": set_("number", -4),
    "a shape below zero": set_("manifest", "entries", 0, "shape", [-5, 3]),
    "a model beyond any memory": set_("manifest", "entries", 0, "shape", [2**62, 2**62]),
    "books without end": set_("manifest", "entries", 0, "shape", [10**10]),
    "chunks of nothing": set_("chunk_elements", 0),
    "chunks of less": set_("chunk_elements", -1),
    "fragments without end": set_("num_fragments", 10**12),
    "a plan for others": set_("plan", [0, 1, 1, 1, 10**9]),
    "a counter that overflows": set_("fragments", "0", "version", "counter", 2**64 - 1),
    "another run": set_("fragments", "0", "version", "run", "\x1b[2J"),
    "counts that are texts": set_("workers", {"w": {"pushes": "many"}}),
    "a worker with escapes": set_("workers", {"\x1b[2J": {}}),
    "a worker that left with escapes": set_("left", ["\x1b[2J"]),
    "a missing worker with escapes": set_("missing", ["\x1b[2J"]),
    "totals of another kind": set_("totals", {"rounds": []}),
    "files as a list": set_("files", []),
    "options as a list": set_("config", [1]),
    "outer state of too few": set_(
        "fragments", "0", "outer", {"momentum": [True, False, False, False]}
    ),
    "outer state as a text": set_("fragments", "0", "outer", "x"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_impossible_checkpoint_is_refused_in_a_sentence(tmp_path: Path, what: str) -> None:
    path = a_saved(tmp_path)
    body = checkpoint.read_manifest(path)
    HOSTILE[what](body)
    write_body(path, body)
    assert len(is_refused(path)) < 600
    is_of_tensors = what.startswith("outer state")
    assert describe(path, quick=True)["sound"] == is_of_tensors


@pytest.mark.parametrize("name", ["../../../../etc/passwd", "/dev/zero", "checkpoint.json"])
def test_foreign_file_in_a_manifest_is_not_opened(tmp_path: Path, name: str) -> None:
    path = a_saved(tmp_path)
    body = checkpoint.read_manifest(path)
    body["files"][name] = {"bytes": 1, "sha256": ""}
    write_body(path, body)
    assert Path(name).name in is_refused(path)


def is_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def is_a_device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def is_too_long(file: Path) -> None:
    with open(file, "r+b") as opened:
        opened.truncate(MOST_JSON_BYTES + 1)  # of no blocks: it takes no room


@pytest.mark.parametrize("become", [is_a_pipe, is_a_device, is_too_long])
@pytest.mark.parametrize("name", [FILE, MANIFEST])
def test_special_or_huge_file_is_refused(
    tmp_path: Path, name: str, become: Callable[[Path], None]
) -> None:
    path = a_saved(tmp_path)
    become(path / name)
    is_refused(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 10_000, "{}", "[]", '{"checkpoint": 1}'])
def test_json_that_is_a_bomb_or_nothing_is_refused(tmp_path: Path, text: str) -> None:
    path = a_saved(tmp_path)
    (path / MANIFEST).write_text(text)
    is_refused(path)


@pytest.mark.parametrize("dtype", ["I32", "BOOL"])
def test_tensors_of_another_kind_are_refused(tmp_path: Path, dtype: str) -> None:
    path = a_saved(tmp_path)
    whole = (path / FILE).read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    size = {"I32": 4, "BOOL": 1}[dtype]
    first, rest = header["parameters"], whole[8 + length :]
    first["dtype"] = dtype
    first["shape"] = [(first["data_offsets"][1] - first["data_offsets"][0]) // size]
    text = json.dumps(header).encode()
    (path / FILE).write_bytes(struct.pack("<Q", len(text)) + text + rest)
    with safe_open(path / FILE, framework="pt"):
        pass  # it is a sound file of safetensors, but not of ours
    body = checkpoint.read_manifest(path)
    changed = (path / FILE).read_bytes()
    body["files"][FILE] = {"bytes": len(changed), "sha256": hashlib.sha256(changed).hexdigest()}
    write_body(path, body)
    is_refused(path)


@pytest.mark.parametrize(
    "trouble",
    [MemoryError("no"), OSError(24, "Too many open files"), RuntimeError("not enough memory")],
)
def test_error_of_the_machine_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    path = a_saved(tmp_path)

    def fails(*_: object) -> None:
        raise trouble

    monkeypatch.setattr(checkpoint_format, "without_tensors", fails)
    with pytest.raises((MemoryError, OSError)):
        checkpoint.load_record(path)
    monkeypatch.setattr(checkpoint, "load", checkpoint.load_record)
    with pytest.raises(UsageError, match="no older one is used"):
        newest_checkpoint(BrokerConfig(save_dir=str(tmp_path)))
