"""Disks that are full, slow or damaged: what it costs the run, and what it must not cost."""

import json
import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_broker import Broker, BrokerConfig
from diloco_broker.storage import checkpoint
from diloco_broker.storage.checkpoint import Damaged, found, load
from diloco_broker.storage.folder_lock import LOCK, FolderLock
from diloco_protocol import UsageError
from diloco_worker import DiLoCoClient
from kit import process_kit
from kit.checkpoints import a_checkpoint, assert_equal
from kit.layers import Layers, a_client, delta, name_of, pushes_and_pulls, serve_options
from kit.process_kit import LOCAL, PATIENCE_S, Child, Processes, memory_kib, wait_for


def test_run_goes_on_while_the_disk_is_full_and_is_saved_when_there_is_room(
    processes: Processes, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    broker = processes.broker(save_dir=str(folder), keep=2)
    with a_client(broker.address()) as client:
        pushes_and_pulls(client, 0, 2)
        wait_for(lambda: client.status()["checkpoint"]["round"] == 2)
        broker.may_write(1000)
        pushes_and_pulls(client, 2, 5)
        problem = wait_for(lambda: client.status()["checkpoint"]["error"])
        assert "File too large" in problem
        texts = [event["text"] for event in client.status()["events"]]
        assert sum("could not be written: File too large" in text for text in texts) == 1
        broker.says("ERROR The checkpoint before round 3 could not be written")
        assert load(found(folder)[0]).number == 2
        # Unfinished saves are removed, except for the one that is being tried now.
        wait_for(lambda: [path.name[0] for path in folder.iterdir() if path.is_dir()] == ["c", "c"])
        broker.may_write(-1)
        final = pushes_and_pulls(client, 5, 6)
        wait_for(lambda: client.status()["checkpoint"]["round"] == 6)
        assert client.status()["checkpoint"]["error"] is None
        broker.says("Checkpoints are written again")
    assert load(found(folder)[0]).record.fragments[0].version == final.version


def test_durable_run_waits_for_room_and_loses_nothing(processes: Processes, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    broker = processes.broker(save_dir=str(folder), durable=True)
    with a_client(broker.address()) as client:
        pushes_and_pulls(client, 0, 1)
        broker.may_write(1000)
        client.push({name_of(0): delta(0, 1)})
        wait_for(lambda: client.status()["checkpoint"]["error"])
        assert client.status()["fragments"][0]["version"] == 1
        broker.says("The round waits for it (--durable)")
        broker.may_write(-1)
        assert client.pull().version.counter == 2
    assert load(found(folder)[0]).number == 2


@pytest.mark.slow
def test_broker_starts_and_ends_on_a_full_disk(processes: Processes, tmp_path: Path) -> None:
    """Neither its lock nor its audit log can be written."""
    audit = tmp_path / "audit"
    options = serve_options(tmp_path / "run", "--audit", str(audit))
    broker = processes.start(process_kit.command_on_a_full_disk, *options)
    with a_client(broker.address()) as client:
        pushes_and_pulls(client, 0, 2)
        texts = " ".join(event["text"] for event in client.status()["events"])
        assert f"Cannot write the audit log {audit}: File too large." in texts
        assert "checkpoint" in texts
    os.kill(broker.pid, signal.SIGTERM)
    assert broker.ends(20) == 0
    assert "Traceback" not in broker.output


@pytest.mark.slow
def test_audit_log_says_nothing_wrong_after_a_disk_was_full(
    processes: Processes, tmp_path: Path
) -> None:
    """Lines that could not be written may be missing; all others can be read."""
    audit = tmp_path / "audit"
    broker = processes.broker(audit=str(audit))
    with a_client(broker.address()) as client:
        pushes_and_pulls(client, 0, 2)
        broker.may_write(audit.stat().st_size + 100)  # a line is cut in the middle
        pushes_and_pulls(client, 2, 4)
        broker.may_write(-1)
        pushes_and_pulls(client, 4, 6)
    broker.kill()
    again = processes.broker(audit=str(audit))
    with a_client(again.address()) as client:
        pushes_and_pulls(client, 0, 1)
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    rounds = [line["round"] for line in lines if line["pushes"]]
    assert rounds[:2] == [0, 1]
    assert rounds[-3:] == [4, 5, 0]


def a_config(folder: Path, **options: Any) -> BrokerConfig:
    """Durable, so that each version is saved, however slow the disk."""
    return BrokerConfig(**{**LOCAL, "save_dir": str(folder), "durable": True, **options})


def test_folder_has_one_broker_at_a_time_and_is_free_when_it_is_killed(
    processes: Processes, tmp_path: Path
) -> None:
    broker = processes.broker(save_dir=str(tmp_path))
    broker.address()
    with pytest.raises(UsageError, match=rf"process {broker.pid}\) saves to .*another --save-dir"):
        Broker(a_config(tmp_path))
    broker.kill()
    Broker(a_config(tmp_path)).close()


LARGE = {"chunk_elements": 1 << 19, "wire_dtype": "fp32", "keep": 1}


@contextmanager
def large(broker: Child, rounds: int) -> Iterator[DiLoCoClient]:
    """A worker with 20 MB of parameters, for which the broker has as much momentum."""
    model = Layers(5, size=1000)
    with DiLoCoClient(broker.address(), timeout=PATIENCE_S) as client:
        client.join(model)
        for _ in range(rounds):
            client.push({name: 1e-3 * torch.randn(1000, 1000) for name in model.state_dict()})
            client.pull()
        yield client


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_the_loop_itself_writes_nothing_of_a_checkpoint(
    processes: Processes, tmp_path: Path
) -> None:
    """The bytes that the loop's thread writes in three saves."""
    broker = processes.broker(**LARGE, save_dir=str(tmp_path))
    with large(broker, rounds=3) as client:
        wait_for(lambda: client.status()["checkpoint"]["round"] == 3)
        assert bytes_written(f"/proc/{broker.pid}/io") > 40e6, "by all threads"
        assert bytes_written(f"/proc/{broker.pid}/task/{broker.pid}/io") < 1e6, "by the loop's"


def bytes_written(file: str) -> int:
    """What the write calls were given, whatever reached a disk by now."""
    return int(re.search(r"wchar: (\d+)", Path(file).read_text())[1])  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_no_copy_of_the_model_is_made_to_save_it(processes: Processes, tmp_path: Path) -> None:
    """The peak of the process's memory while it saves."""
    broker = processes.broker(**LARGE, save_dir=str(tmp_path), save_every=100)
    with large(broker, rounds=2) as client:
        Path(f"/proc/{broker.pid}/clear_refs").write_text("5")  # the peak begins anew
        before = memory_kib(broker.pid, "VmHWM")
        assert client.control("save").ok
        wait_for(lambda: client.status()["checkpoint"]["round"] == 2)
        assert memory_kib(broker.pid, "VmHWM") - before < 7_800  # KiB
    file = found(tmp_path)[0] / "fragment-0.safetensors"
    assert file.stat().st_size > 40e6


@pytest.mark.slow
def test_save_that_is_killed_at_any_moment_leaves_what_was_there(
    processes: Processes, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    draw = random.Random(5)
    for life in range(1, 5):
        child = processes.start(process_kit.save_for_ever, folder, life)
        child.says(f"saved 2 of {life}")
        threading.Event().wait(draw.uniform(0, 0.05))  # the moment is the fault
        child.kill()
        made = [load(path) for path in found(folder)]
        assert made[0].life == life
        assert made[0].number >= 2
        for each in made:
            assert_equal(each, replace(a_checkpoint(each.number, seed=each.number), life=each.life))
    FolderLock(folder).release()
    left = {path.name for path in folder.iterdir()}
    assert left == {LOCK, *(path.name for path in found(folder))}, "unfinished saves are removed"


def test_file_that_another_life_has_damaged_is_not_linked_to(tmp_path: Path) -> None:
    """The newest is damaged, the broker goes on from the one before and is given the same version."""
    old = a_checkpoint(4)
    checkpoint.save(tmp_path, old, keep=3)
    fresh = a_checkpoint(5, seed=1)
    newer = checkpoint.save(tmp_path, fresh, keep=3)
    for file in newer.glob("fragment-*"):
        whole = file.read_bytes()
        file.unlink()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(Damaged):
        load(newer)
    adopted = replace(fresh, life=old.life + 1)
    assert_equal(load(checkpoint.save(tmp_path, adopted, keep=3)), adopted)


def test_checkpoint_that_is_written_again_never_disappears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only one is requested twice."""
    made = a_checkpoint(4)
    checkpoint.save(tmp_path, made, keep=1)
    rename = Path.rename

    def look(self: Path, target: Path) -> Path:
        assert found(tmp_path), "a kill at this moment would lose the run"
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", look)
    assert_equal(load(checkpoint.save(tmp_path, made, keep=1)), made)
