"""The folder of a run: a run found there is resumed or moved aside; permissions and locks."""

import ctypes
import errno
import fcntl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

import pytest
import torch
from typer.testing import CliRunner

from diloco_broker import Broker
from diloco_broker.cli.app import app
from diloco_broker.storage import checkpoint, folder_lock
from diloco_broker.storage.folder_lock import LOCK, FolderLock
from diloco_protocol.errors import Refused, UsageError
from diloco_worker import DiLoCoClient
from kit.whole_run import make_config

PATIENCE_S = 40.0


def train(folder: Path, features: int = 3, **options: object) -> Broker:
    """Serve a run in this folder for one round of a model of this size; returns the ended broker."""
    config = make_config(save_dir=str(folder), recover_wait=0.0, **options)
    model = torch.nn.Linear(features, 1)
    with Broker(config) as broker, DiLoCoClient(broker.address, timeout=PATIENCE_S) as client:
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
    delta = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    first = Broker(make_config(save_dir=str(tmp_path / "run"), recover_wait=0.0))
    with DiLoCoClient(first.address, timeout=PATIENCE_S) as client:
        with first:
            client.join(model)
            client.push(delta)
            client.pull()
        second = make_config(save_dir=str(tmp_path / "run"), fresh=True, recover_wait=0.0)
        with (
            Broker(replace(second, bind=first.address)),
            pytest.raises(Refused, match="--fresh moved aside"),
        ):
            client.push(delta)


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


# Permissions, and file systems without locks.

T = TypeVar("T")
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
    """A folder with the checkpoints of two incarnations of a broker."""
    folder = tmp_path / "run"
    for _ in range(2):
        train(folder)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)


@pytest.mark.parametrize("what", ["", checkpoint.MANIFEST, "fragment-0.safetensors"])
def test_newest_checkpoint_that_may_not_be_read_is_not_passed_over(saved: Path, what: str) -> None:
    newest, *_, older = checkpoint.found(saved)  # of another incarnation: no file is a link
    (newest / what).chmod(0)
    config = make_config(save_dir=str(saved))
    with pytest.raises(UsageError, match=rf"{newest.name}.*Permission denied.*--resume PATH"):
        as_a_user(lambda: Broker(config))
    named = make_config(save_dir=str(saved), resume=str(older))
    as_a_user(lambda: Broker(named)).close()


def test_lock_of_another_user_keeps_a_broker_out_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    (tmp_path / LOCK).chmod(0)
    with pytest.raises(UsageError, match=rf"{LOCK} cannot be opened: Permission.*--save-dir"):
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
