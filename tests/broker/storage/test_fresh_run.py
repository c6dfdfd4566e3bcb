"""A run found in the folder is resumed and named; `--fresh` moves it aside and begins a new one."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from diloco_broker import Broker
from diloco_broker.storage import checkpoint, folder_lock
from diloco_broker.storage.folder_lock import FolderLock
from diloco_protocol.errors import Refused, UsageError
from diloco_worker import DiLoCoClient
from kit.whole_run import make_config

PATIENCE_S = 40.0


def train(folder: Path, features: int = 3, **options: object) -> Broker:
    """Serve a run in this folder for one round of a model of this size; returns the ended broker."""
    config = make_config(save_dir=str(folder), recover_wait=0.0, **options)
    model = torch.nn.Linear(features, 1)
    with (
        Broker(config) as broker,
        DiLoCoClient(broker.address, timeout=PATIENCE_S) as client,
    ):
        client.join(model)
        client.push({name: torch.ones_like(p) for name, p in model.named_parameters()})
        client.pull()
    return broker


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_resumed_run_is_named_also_to_a_worker_whose_model_does_not_fit(tmp_path: Path) -> None:
    assert train(tmp_path / "run").resumed == ""
    assert train(tmp_path / "run").resumed.endswith("1 round")
    with pytest.raises(Refused, match=r"2 rounds.*--fresh"):
        train(tmp_path / "run", features=5)


def test_fresh_run_keeps_the_former_one_beside_it(tmp_path: Path) -> None:
    train(tmp_path / "run")
    before = content(tmp_path / "run")
    train(tmp_path / "run", features=5, fresh=True)
    (former,) = (path for path in tmp_path.iterdir() if path.name != "run")
    assert former.name.startswith("run-20")
    assert content(former) == before
    again = train(tmp_path / "run", features=5, resume="auto")
    assert again.resumed.endswith("1 round"), "the new run is resumed without --fresh"
    assert train(former).resumed.endswith("1 round"), "and so is the former, under its new name"


def test_link_to_the_folder_leads_to_the_new_run(tmp_path: Path) -> None:
    train(tmp_path / "run")
    (tmp_path / "link").symlink_to("run")
    train(tmp_path / "link", fresh=True)
    assert len(list(tmp_path.glob("run-20*"))) == 1
    assert train(tmp_path / "run").resumed.endswith("1 round")


def test_fresh_start_leaves_the_folder_of_a_running_broker_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder)
    config = make_config(save_dir=str(folder), recover_wait=0.0)
    with Broker(config), pytest.raises(UsageError, match="Another broker"):
        Broker(make_config(save_dir=str(folder), fresh=True))
    assert list(tmp_path.iterdir()) == [folder]


def test_fresh_run_refuses_workers_of_the_run_that_it_moved_aside(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    first = Broker(make_config(save_dir=str(tmp_path / "run"), recover_wait=0.0))
    with DiLoCoClient(first.address, timeout=PATIENCE_S) as client:
        with first:
            client.join(model)
            client.push({name: torch.ones_like(p) for name, p in model.named_parameters()})
            client.pull()
        second = make_config(save_dir=str(tmp_path / "run"), fresh=True, recover_wait=0.0)
        with (
            Broker(replace(second, bind=first.address)),
            pytest.raises(Refused, match="--fresh moved aside"),
        ):
            client.push({name: torch.ones_like(p) for name, p in model.named_parameters()})


@pytest.mark.parametrize("step", ["mkdir", "lock"])
def test_fresh_start_that_finds_no_room_for_a_new_folder_puts_the_run_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    folder = tmp_path / "run"
    train(folder)
    before = content(folder)
    lock = FolderLock(folder)

    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        if step == "mkdir":
            disk.setattr(Path, "mkdir", full)
        else:
            disk.setattr(folder_lock, "open", full, raising=False)
        with pytest.raises(UsageError, match="No space left"):
            lock.set_aside()
    assert content(folder) == before
    assert list(tmp_path.iterdir()) == [folder]
    with pytest.raises(UsageError, match="Another broker"):  # the lock is still held
        FolderLock(folder)
    lock.release()


def test_start_that_fails_moves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder)
    with Broker(make_config()) as other, pytest.raises(UsageError, match="bind"):
        Broker(replace(make_config(save_dir=str(folder), fresh=True), bind=other.address))
    assert list(tmp_path.iterdir()) == [folder]


def test_current_folder_is_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(UsageError, match="--fresh cannot rename"):
        Broker(make_config(save_dir=".", fresh=True))
    assert checkpoint.found(tmp_path / "run")
