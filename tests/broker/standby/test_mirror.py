"""A hub's checkpoints, copied over the wire while it runs."""

import hashlib
import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco_broker import Broker, BrokerConfig
from diloco_broker.core.effects import ReadCheckpoint
from diloco_broker.standby import mirror as mirrors
from diloco_broker.standby.mirror import Copy, CopyFailed, Mirror, Outdated, listing_of
from diloco_broker.storage import checkpoint
from diloco_broker.storage.checkpoint import Damaged
from diloco_broker.storage.pieces import MOST_WAITING, PIECE_BYTES, PieceReader, files_of
from diloco_protocol.clients import Operator
from diloco_protocol.clients.dealer import Dealer
from diloco_protocol.errors import UsageError
from diloco_protocol.messages import Error, Message, Result
from kit.checkpoints import a_checkpoint, assert_equal
from kit.process_kit import LOCAL, Processes, save_for_ever, wait_for


def options(folder: Path, **given: Any) -> BrokerConfig:
    usual: dict[str, Any] = {"num_fragments": 2, "sync_every": 4, "chunk_elements": 4}
    return BrokerConfig(**LOCAL | {"save_dir": str(folder)} | usual | given)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Broker]:
    """One with a checkpoint, before round 4."""
    folder = tmp_path / "hub"
    checkpoint.save(folder, a_checkpoint(), keep=3)
    with Broker(options(folder)) as made:
        yield made


def has_copied(mirror: Mirror, name: str) -> bool:
    return mirror.newest is not None and mirror.newest.name == name


def is_copied(mirror: Mirror, source: Path) -> Path:
    """Wait for the copy, and compare it byte by byte."""
    wait_for(lambda: has_copied(mirror, source.name))
    assert mirror.newest is not None
    names = sorted(path.name for path in source.iterdir())
    assert names == sorted(path.name for path in mirror.newest.iterdir())
    for name in names:
        assert (source / name).read_bytes() == (mirror.newest / name).read_bytes()
    return mirror.newest


def test_each_checkpoint_is_copied_and_an_unchanged_file_only_linked(
    hub: Broker, tmp_path: Path
) -> None:
    folder, there = tmp_path / "hub", tmp_path / "standby"
    (first,) = checkpoint.found(folder)
    second = first.with_name(first.name.replace("04", "05"))
    with Mirror(hub.address, there) as mirror:
        copy = is_copied(mirror, first)
        assert_equal(checkpoint.load(copy), a_checkpoint())
        came = mirror.bytes_copied
        shutil.copytree(first, folder / ".new")
        (folder / ".new").rename(second)
        again = is_copied(mirror, second)
        assert mirror.bytes_copied - came == (first / checkpoint.MANIFEST).stat().st_size
        name = "fragment-0.safetensors"
        assert (copy / name).stat().st_ino == (again / name).stat().st_ino
        is_copied(mirror, checkpoint.save(folder, a_checkpoint(6), keep=3))
        wait_for(lambda: mirror.problem is None)
    assert not list(there.glob(".checkpoint-*"))


def test_copy_that_lost_its_connection_goes_on_where_it_was(
    hub: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = itertools.count()

    class Breaks(Dealer):
        """A connection that is lost once two pieces have come, after the list of files."""

        def receive(self, until: float) -> tuple[Message, Any] | None:
            found = super().receive(until)
            if found is not None and next(answers) == 3:
                return Error("unreachable", "The line was cut."), None
            return found

    monkeypatch.setattr(mirrors, "Dealer", Breaks)
    (first,) = checkpoint.found(tmp_path / "hub")
    with Mirror(hub.address, tmp_path / "standby") as mirror:
        is_copied(mirror, first)
        assert mirror.bytes_copied == sum(path.stat().st_size for path in first.iterdir())
    assert next(answers) > 4


def test_checkpoint_that_is_copied_slowly_is_kept_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    reader = PieceReader(folder, lambda: None)
    try:
        slow = checkpoint.save(folder, a_checkpoint(1), keep=1)
        reader.ask(ReadCheckpoint(b"r", 1, slow.name, checkpoint.MANIFEST, 0))
        wait_for(lambda: reader.results)
        for number in (2, 3):
            newest = checkpoint.save(folder, a_checkpoint(number), 1, reader.spared())
            assert checkpoint.found(folder) == [newest, slow]
    finally:
        reader.close()


def test_copy_that_is_there_is_compared_and_not_made_again(hub: Broker, tmp_path: Path) -> None:
    there = tmp_path / "standby"
    (first,) = checkpoint.found(tmp_path / "hub")
    shutil.copytree(first, there / first.name)
    with Mirror(hub.address, there) as mirror:
        is_copied(mirror, first)
        assert mirror.bytes_copied == 0
    (there / first.name / "fragment-1.safetensors").write_bytes(b"harm")
    with Mirror(hub.address, there) as mirror:
        is_copied(mirror, first)
        assert mirror.bytes_copied > 0


def test_copies_are_sound_while_the_hub_saves(processes: Processes, tmp_path: Path) -> None:
    """A writer that keeps two of them takes many away in the middle of a copy."""
    folder, there = tmp_path / "hub", tmp_path / "standby"
    with Broker(options(folder)) as hub, Mirror(hub.address, there, keep=3) as mirror:
        writer = processes.start(save_for_ever, folder, 1)
        writer.says("saved 20 of 1")
        wait_for(lambda: mirror.newest is not None)
        writer.kill()
        is_copied(mirror, checkpoint.found(folder)[0])
    for path in checkpoint.found(there):
        number = checkpoint.load_record(path).number
        written = replace(a_checkpoint(number, seed=number), incarnation=1)
        assert_equal(checkpoint.load(path), written)


def test_hub_that_saves_nothing_or_has_no_checkpoint_yet_says_so(tmp_path: Path) -> None:
    with Broker(options(tmp_path / "hub")) as hub, Mirror(hub.address, tmp_path / "a") as mirror:
        wait_for(lambda: "No checkpoint yet" in (mirror.problem or ""))
    with Broker(BrokerConfig(**LOCAL)) as hub, Mirror(hub.address, tmp_path / "b") as mirror:
        wait_for(lambda: "--save-dir" in (mirror.problem or ""))


def test_folder_of_another_broker_is_left_alone(hub: Broker, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Another broker"):
        Mirror(hub.address, tmp_path / "hub")


def test_checkpoint_of_another_run_in_the_folder_is_named(hub: Broker, tmp_path: Path) -> None:
    there = tmp_path / "standby"
    other = there / "checkpoint-0009-000000000001"
    shutil.copytree(checkpoint.found(tmp_path / "hub")[0], other)
    with Mirror(hub.address, there) as mirror:
        wait_for(lambda: "move it away" in (mirror.problem or ""))
        assert other.name in (mirror.problem or "")
        assert len(checkpoint.found(there)) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"checkpoint": "x", "file": "y", "offset": -1},
        {"checkpoint": "..", "file": "checkpoint.json", "offset": 0},
        {"file": "../../secret", "offset": 0},
        {"file": "fragment-9.safetensors", "offset": 0},
        {"file": "fragment-8.safetensors", "offset": 0},
        {"checkpoint": "checkpoint-0001-000000000001", "offset": 0},
    ],
)
def test_only_checkpoints_are_read(hub: Broker, tmp_path: Path, arguments: dict[str, Any]) -> None:
    (place,) = checkpoint.found(tmp_path / "hub")
    (tmp_path / "secret").write_text("secret")
    (place / "fragment-8.safetensors").symlink_to(tmp_path / "secret")
    usual = {"checkpoint": place.name, "file": "checkpoint.json"} if arguments else {}
    with Operator(hub.address) as operator:
        result = operator.ask("piece", **usual | arguments)
    assert not result.ok


def test_more_requests_than_may_wait_are_refused(tmp_path: Path) -> None:
    reader = PieceReader(tmp_path, lambda: None)
    answers = [reader.ask(ReadCheckpoint(b"r", n)) for n in range(10 * MOST_WAITING)]
    try:
        refused = [each for each in answers if each is not None]
        assert len(refused) == 9 * MOST_WAITING
        assert all(each.data["again"] for each in refused)
        wait_for(lambda: len(reader.results) == MOST_WAITING)
        asked = [result.request for _, result in itertools.islice(reader.results, 3)]
        assert asked == [0, 1, 2]
    finally:
        reader.close()


# What is asked of a hub for a checkpoint, and what is believed of its answers.

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
def a_copy(tmp_path: Path) -> Copy:
    return Copy(listing_of(listed()), tmp_path, {})


def written(folder: Path) -> dict[str, bytes]:
    (aside,) = folder.iterdir()
    return {path.name: path.read_bytes() for path in aside.iterdir()}


def test_all_files_come_piece_by_piece_the_manifest_last(a_copy: Copy, tmp_path: Path) -> None:
    while a_copy.missing:
        assert "checkpoint.json" not in written(tmp_path)
        a_copy.arrives(answer(a_copy))
    assert written(tmp_path) == FILES
    a_copy.drop()
    assert not list(tmp_path.iterdir())


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
def test_listing_of_other_files_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(CopyFailed):
        listing_of(listed(**changed))


@pytest.mark.parametrize(("again", "error"), [({"again": True}, Outdated), ({}, CopyFailed)])
def test_refusal_says_whether_to_ask_for_the_newest(
    a_copy: Copy, again: dict[str, Any], error: type[CopyFailed]
) -> None:
    refused = Result(1, False, "It is not kept any more.", again)
    with pytest.raises(error, match="not kept"):
        listing_of(refused)
    with pytest.raises(error) as raised:
        a_copy.arrives(refused)
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
def test_another_piece_than_was_asked_for_ends_the_copy(a_copy: Copy, data: dict[str, Any]) -> None:
    with pytest.raises(CopyFailed, match="piece"):
        a_copy.arrives(Result(2, True, "", data))


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
