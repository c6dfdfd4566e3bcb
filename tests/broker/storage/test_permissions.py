"""A broker whose folder it may not read or write, or that is on a file system without locks."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from typer.testing import CliRunner

from diloco_broker import Broker
from diloco_broker.cli.app import app
from diloco_broker.storage import checkpoint
from diloco_broker.storage.folder_lock import LOCK, FolderLock
from diloco_protocol.errors import UsageError
from diloco_worker import DiLoCoClient
from kit.whole_run import make_config

T = TypeVar("T")
PATIENCE_S = 40.0
# linux/capability.h: the version of the call, and the two rights by which root passes every permission.
CAPABILITY_VERSION = 0x20080522
DAC_OVERRIDE, DAC_READ_SEARCH = 1 << 1, 1 << 2


def _obey_permissions() -> None:
    """From here on this thread may read and write only what its user may, also as root."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    assert libc.capget(header, sets) == 0
    sets[0] &= ~(DAC_OVERRIDE | DAC_READ_SEARCH)
    assert libc.capset(header, sets) == 0, "the rights of root cannot be given up here"


def as_a_user(work: Callable[[], T]) -> T:
    """What this returns or raises in a thread that is bound by permissions."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            _obey_permissions()
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - raised below
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE_S)
    if failure:
        raise failure[0]
    return outcome[0]


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Path]:
    """A folder with the checkpoints of two lives of a broker."""
    folder = tmp_path / "run"
    model = torch.nn.Linear(3, 3)
    for _ in range(2):
        with (
            Broker(make_config(save_dir=str(folder), recover_wait=0.0)) as broker,
            DiLoCoClient(broker.address, timeout=PATIENCE_S) as client,
        ):
            client.join(model)
            client.push({name: torch.ones_like(p) for name, p in model.named_parameters()})
            client.pull()
    yield folder
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)


@pytest.mark.parametrize("what", ["", checkpoint.MANIFEST, "fragment-0.safetensors"])
def test_newest_checkpoint_that_may_not_be_read_is_not_passed_over(saved: Path, what: str) -> None:
    newest, *_, older = checkpoint.found(
        saved
    )  # of another life, so no file is a link to the newest's
    (newest / what).chmod(0)
    config = make_config(save_dir=str(saved))
    with pytest.raises(UsageError, match=rf"{newest.name}.*Permission denied.*--resume PATH"):
        as_a_user(lambda: Broker(config))
    named = make_config(save_dir=str(saved), resume=str(older))
    as_a_user(lambda: Broker(named)).close()


def test_lock_of_another_user_keeps_a_broker_out_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    (tmp_path / LOCK).chmod(0)
    with pytest.raises(
        UsageError, match=rf"{LOCK} cannot be opened: Permission denied.*--save-dir"
    ):
        as_a_user(lambda: FolderLock(tmp_path))


def test_folder_that_this_user_may_not_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    for folder in (tmp_path, tmp_path / "run"):
        config = make_config(save_dir=str(folder))
        with pytest.raises(UsageError, match=r"--save-dir .* cannot be written: Permission denied"):
            as_a_user(partial(Broker, config))


def test_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    done = CliRunner().invoke(app, ["serve", "--save-dir", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert str(tmp_path / "run") in done.output


def test_folder_is_locked_once_a_full_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def is_full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Path, "mkdir", is_full)
        lock = FolderLock(tmp_path)
    assert "cannot be written: No space left" in caplog.text
    lock.take()
    with pytest.raises(UsageError, match="Another broker"):
        FolderLock(tmp_path)
    lock.release()
    FolderLock(tmp_path).release()


def test_file_system_without_locks_is_named_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    FolderLock(tmp_path).release()
    assert "No locks available" in caplog.text
