"""What is asked of a hub for a checkpoint, and what is believed of its answers."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from diloco_broker.standby.copying import (
    WINDOW,
    Ask,
    CopyFailed,
    Copying,
    Listing,
    Outdated,
    listing_of,
)
from diloco_broker.storage.pieces import PIECE_BYTES
from diloco_protocol.messages import Result

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


def answer(ask: Ask) -> Result:
    piece = FILES[ask.file][ask.offset : ask.offset + PIECE_BYTES]
    return Result(2, True, "", {"offset": ask.offset, "bytes": piece})


def asks_of(copying: Copying) -> list[Ask]:
    """What it asks for now, until enough is on its way."""
    asks = []
    while (ask := copying.next()) is not None:
        asks.append(ask)
    return asks


def copied(copying: Copying) -> dict[str, bytes]:
    """What comes of it where the hub answers as it should."""
    made: dict[str, bytes] = {}
    while not copying.is_whole:
        for ask in asks_of(copying):
            write = copying.arrives(answer(ask))
            made[write.file] = made.get(write.file, b"") + write.piece
            assert write.is_whole == (made[write.file] == FILES[write.file])
    return made


@pytest.fixture
def listing() -> Listing:
    return listing_of(listed())


def test_all_files_come_piece_by_piece_the_manifest_last(listing: Listing) -> None:
    made = copied(Copying(listing, ()))
    assert made == FILES
    assert list(made)[-1] == "checkpoint.json"


def test_few_pieces_are_on_their_way_at_a_time(listing: Listing) -> None:
    copying = Copying(listing, ())
    first = asks_of(copying)
    assert len(first) == WINDOW
    copying.arrives(answer(first[0]))
    assert len(asks_of(copying)) == 1


def test_copy_goes_on_where_the_line_broke(listing: Listing) -> None:
    copying = Copying(listing, ())
    first, *lost = asks_of(copying)
    copying.arrives(answer(first))
    copying.goes_on()
    again = asks_of(copying)
    assert again[: len(lost)] == lost
    while again:
        copying.arrives(answer(again.pop(0)))
        again += asks_of(copying)
    assert copying.is_whole


def test_file_that_is_here_does_not_come_again_but_the_manifest_does(listing: Listing) -> None:
    copying = Copying(listing, [each.sha256 for each in listing.files if "1" not in each.name])
    assert [each.name for each in copying.linked] == ["fragment-0.safetensors"]
    assert copied(copying).keys() == {"fragment-1.safetensors", "checkpoint.json"}


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
    listing: Listing, again: dict[str, Any], error: type[CopyFailed]
) -> None:
    refused = Result(1, False, "It is not kept any more.", again)
    with pytest.raises(error, match="not kept"):
        listing_of(refused)
    copying = Copying(listing, ())
    copying.next()
    with pytest.raises(error) as raised:
        copying.arrives(refused)
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
def test_another_piece_than_was_asked_for_ends_the_copy(
    listing: Listing, data: dict[str, Any]
) -> None:
    copying = Copying(listing, ())
    copying.next()
    with pytest.raises(CopyFailed, match="piece"):
        copying.arrives(Result(2, True, "", data))


def test_file_that_came_damaged_is_not_taken(listing: Listing) -> None:
    copying = Copying(listing, ())
    pieces = [answer(ask) for ask in asks_of(copying)[:3]]
    pieces[2].data["bytes"] = b"aaaaX"  # type: ignore[index]
    for piece in pieces[:2]:
        copying.arrives(piece)
    with pytest.raises(CopyFailed, match="checksum"):
        copying.arrives(pieces[2])
