"""A hub's checkpoints, copied over the wire while it runs."""

from __future__ import annotations

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
from diloco_broker.standby.mirror import Mirror
from diloco_broker.storage import checkpoint
from diloco_broker.storage.pieces import MOST_WAITING, PieceReader
from diloco_protocol.clients import Operator
from diloco_protocol.clients.dealer import Dealer
from diloco_protocol.errors import UsageError
from diloco_protocol.messages import Error, Message
from kit.checkpoints import a_checkpoint, assert_equal
from kit.process_kit import Processes, save_for_ever, wait_for
from kit.sites import Sites, assert_same, star

pytest_plugins = ("kit.process_fixtures",)


def options(folder: Path, **given: Any) -> BrokerConfig:
    anywhere = "tcp://127.0.0.1:*"
    usual: dict[str, Any] = {"num_fragments": 2, "sync_every": 4, "chunk_elements": 4}
    return BrokerConfig(bind=anywhere, feed=anywhere, save_dir=str(folder), **usual | given)


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


def test_newest_checkpoint_is_copied_and_a_newer_one_when_it_is_there(
    hub: Broker, tmp_path: Path
) -> None:
    folder, there = tmp_path / "hub", tmp_path / "standby"
    (first,) = checkpoint.found(folder)
    with Mirror(hub.address, there) as mirror:
        copy = is_copied(mirror, first)
        assert_equal(checkpoint.load(copy), a_checkpoint())
        came = mirror.bytes_copied
        second = checkpoint.save(folder, a_checkpoint(5), keep=3)
        is_copied(mirror, second)
        assert mirror.bytes_copied > came
        wait_for(lambda: mirror.problem is None)
    assert not list(there.glob(".checkpoint-*"))


def test_file_that_did_not_change_is_linked_and_comes_once(hub: Broker, tmp_path: Path) -> None:
    folder, there = tmp_path / "hub", tmp_path / "standby"
    (first,) = checkpoint.found(folder)
    second = folder / "checkpoint-0002-000000000005"
    with Mirror(hub.address, there) as mirror:
        copy = is_copied(mirror, first)
        came = mirror.bytes_copied
        shutil.copytree(first, folder / ".new")
        (folder / ".new").rename(second)
        again = is_copied(mirror, second)
        size = (first / checkpoint.MANIFEST).stat().st_size
        assert mirror.bytes_copied - came == size
        name = "fragment-0.safetensors"
        assert (copy / name).stat().st_ino == (again / name).stat().st_ino


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


def test_copy_that_is_there_already_is_compared_and_not_copied_again(
    hub: Broker, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("reply", ["fp32", "int4z"])
def test_broker_goes_on_from_the_copy_bit_for_bit(tmp_path: Path, reply: str) -> None:
    """With momentum, and what replies have not sent of the parameters yet."""
    there = tmp_path / "standby"
    of_the_run: dict[str, Any] = {
        "reply_dtype": reply,
        "outer_momentum": 0.9,
        "deterministic": True,
        "min_workers": 2,
    }
    expected = star(range(6), "a", "b", **of_the_run)
    with Sites() as sites:
        hub = sites.hub(2, save_dir=str(tmp_path / "hub"), **of_the_run)
        sites.workers(hub, "a", "b")
        sites.rounds(range(3), "a", "b")
        with Mirror(hub.address, there) as mirror:
            wait_for(lambda: has_copied(mirror, "checkpoint-0001-000000000003"))
    with Sites() as sites:
        second = sites.hub(2, has_model=False, save_dir=str(there), recover_wait=0.0, **of_the_run)
        assert second.resumes
        sites.workers(second, "a", "b")
        assert_same(expected, sites.rounds(range(3, 6), "a", "b"))


def test_copies_are_sound_while_the_hub_writes_and_removes(
    processes: Processes, tmp_path: Path
) -> None:
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
        written = replace(a_checkpoint(number, seed=number), life=1)
        assert_equal(checkpoint.load(path), written)


def test_hub_that_saves_nothing_says_so_and_so_does_one_without_a_checkpoint(
    tmp_path: Path,
) -> None:
    with Broker(options(tmp_path / "hub")) as hub, Mirror(hub.address, tmp_path / "a") as mirror:
        wait_for(lambda: "No checkpoint yet" in (mirror.problem or ""))
    config = BrokerConfig(bind="tcp://127.0.0.1:*", feed="tcp://127.0.0.1:*", save_dir=None)
    with Broker(config) as hub, Mirror(hub.address, tmp_path / "b") as mirror:
        wait_for(lambda: "--save-dir" in (mirror.problem or ""))


def test_folder_of_another_broker_is_left_alone(hub: Broker, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Another broker"):
        Mirror(hub.address, tmp_path / "hub")


def test_checkpoint_of_another_run_that_would_be_taken_instead_is_named(
    hub: Broker, tmp_path: Path
) -> None:
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
def test_nothing_but_files_of_checkpoints_is_read(
    hub: Broker, tmp_path: Path, arguments: dict[str, Any]
) -> None:
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
