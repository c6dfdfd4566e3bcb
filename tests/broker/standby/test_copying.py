"""What is asked of a hub for a checkpoint, and what is believed of its answers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from diloco_broker.standby.mirror import Copy, CopyFailed, Outdated, listing_of
from diloco_broker.storage import checkpoint
from diloco_broker.storage.checkpoint import Damaged
from diloco_broker.storage.pieces import PIECE_BYTES, files_of
from diloco_protocol.messages import Result
from kit.checkpoints import a_checkpoint

NAME = "checkpoint-0001-000000000004"
FILES = {
    "fragment-0.safetensors": b"a" * (2 * PIECE_BYTES + 5),
    "fragment-1.safetensors": b"b" * PIECE_BYTES,
    "checkpoint.json": b"{}",
}


def row(name: str, content: bytes) -> dict[str, Any]:
    return {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def listed(**changed: Any) -> Result:
    data = {"checkpoint": NAME, "files": tuple(row(*each) for each in FILES.items()), **changed}
    return Result(1, True, "", data)


def answer(copy: Copy) -> Result:
    """The piece that is to come next, as the hub sends it."""
    file, offset = copy.missing[0]
    piece = FILES[file.name][offset : offset + PIECE_BYTES]
    return Result(2, True, "", {"offset": offset, "bytes": piece})


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(listing_of(listed()), tmp_path, {})


def written(folder: Path) -> dict[str, bytes]:
    (aside,) = folder.iterdir()
    return {path.name: path.read_bytes() for path in aside.iterdir()}


def test_all_files_come_piece_by_piece_the_manifest_last(copy: Copy, tmp_path: Path) -> None:
    while copy.missing:
        assert "checkpoint.json" not in written(tmp_path)
        copy.arrives(answer(copy))
    assert written(tmp_path) == FILES
    copy.drop()
    assert not list(tmp_path.iterdir())


def test_file_that_is_here_does_not_come_again_but_the_manifest_does(tmp_path: Path) -> None:
    listing, here = listing_of(listed()), tmp_path / "here"
    here.write_bytes(FILES["fragment-0.safetensors"])
    sums = {each.sha256: here for each in listing.files if "1" not in each.name}
    copy = Copy(listing, tmp_path / "copies", sums)
    assert {file.name for file, _ in copy.missing} == {"fragment-1.safetensors", "checkpoint.json"}
    while copy.missing:
        copy.arrives(answer(copy))
    assert written(tmp_path / "copies") == FILES


@pytest.mark.parametrize(
    "changed",
    [
        {"checkpoint": "../elsewhere"},
        {"checkpoint": None},
        {"files": ()},
        {"files": 5},
        {"files": (row("checkpoint.json", b""), row("fragment-0.safetensors", b""))},
        {"files": (row("../x", b""), row("checkpoint.json", b""))},
        {"files": (row("checkpoint.json", b"") | {"bytes": -1},)},
        {"files": (row("checkpoint.json", b"") | {"sha256": "x"},)},
        {"files": (row("checkpoint.json", b""), row("checkpoint.json", b""))},
    ],
)
def test_listing_that_is_no_checkpoint_is_not_believed(changed: dict[str, Any]) -> None:
    with pytest.raises(CopyFailed):
        listing_of(listed(**changed))


@pytest.mark.parametrize(("again", "error"), [({"again": True}, Outdated), ({}, CopyFailed)])
def test_refusal_says_whether_to_ask_for_the_newest(
    copy: Copy, again: dict[str, Any], error: type[CopyFailed]
) -> None:
    refused = Result(1, False, "It is not kept any more.", again)
    with pytest.raises(error, match="not kept"):
        listing_of(refused)
    with pytest.raises(error) as raised:
        copy.arrives(refused)
    assert type(raised.value) is error


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"offset": 0, "bytes": b"a"},
        {"offset": PIECE_BYTES, "bytes": b"a" * PIECE_BYTES},
        {"offset": 0, "bytes": "a" * PIECE_BYTES},
    ],
)
def test_another_piece_than_was_asked_for_ends_the_copy(copy: Copy, data: dict[str, Any]) -> None:
    with pytest.raises(CopyFailed, match="piece"):
        copy.arrives(Result(2, True, "", data))


def test_file_that_came_damaged_is_not_taken(tmp_path: Path) -> None:
    there = checkpoint.save(tmp_path / "hub", a_checkpoint(), keep=1)
    copy = Copy(listing_of(listed(files=tuple(files_of(there)))), tmp_path / "here", {})
    while copy.missing:
        content = (there / copy.missing[0][0].name).read_bytes()
        damaged = content if len(copy.missing) == 1 else content[:-1] + b"X"
        copy.arrives(Result(2, True, "", {"offset": 0, "bytes": damaged}))
    with pytest.raises(Damaged, match="checksum"):
        copy.finish(tmp_path / "here" / NAME)
    assert not (tmp_path / "here" / NAME).exists()


def test_manifest_that_names_other_files_than_were_listed_is_not_taken(tmp_path: Path) -> None:
    place = checkpoint.save(tmp_path / "hub", a_checkpoint(), keep=1)
    content = (place / "checkpoint.json").read_bytes()
    copy = Copy(listing_of(listed(files=(row("checkpoint.json", content),))), tmp_path / "here", {})
    copy.arrives(Result(2, True, "", {"offset": 0, "bytes": content}))
    with pytest.raises(CopyFailed, match="manifest"):
        copy.finish(tmp_path / "here" / NAME)
    assert not (tmp_path / "here" / NAME).exists()
