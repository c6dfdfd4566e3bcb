"""The folder of keys: what `diloco-broker keygen` makes and says, and whom a broker lets in by it."""

import json
import os
import re
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from typer.testing import CliRunner

from diloco_broker.cli.app import app
from diloco_broker.storage.key_folder import KeyFolder
from diloco_protocol.clients.keys import read_keys
from diloco_protocol.errors import UsageError
from diloco_protocol.roles import Peer, Role

GPU = Peer(Role.WORKER, "GPU-0")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def keygen(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["keygen", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


def peers(folder: Path) -> set[Peer]:
    return set(KeyFolder(folder).allowed().by_key.values())


@pytest.mark.usefixtures("open_umask")
def test_only_the_owner_may_read_or_write_the_keys(tmp_path: Path) -> None:
    above = tmp_path / "above"
    assert keygen(above / "keys", "gpu-0")[0] == 0
    found = [above, *above.rglob("*")]
    assert {stat.S_IMODE(each.stat().st_mode) for each in found if each.is_dir()} == {0o700}
    assert {stat.S_IMODE(each.stat().st_mode) for each in found if each.is_file()} == {0o600}


def test_first_call_prints_a_line_for_each_machine_and_makes_its_files(path: Path) -> None:
    _, said = keygen(path, "gpu-0", "gpu-1", "--operator", "anna")
    assert f"serve --keys {shlex.quote(str(path))} --bind tcp://0.0.0.0:8512" in said
    for name in ("gpu-0", "gpu-1"):
        copy = rf"scp (\S+) {name}: # there: export DILOCO_KEYS=~/worker-{name}.key"
        found = re.search(copy, said)
        assert found and read_keys(Path(found[1])).peer == Peer(Role.WORKER, name)
    for command, peer in (
        ("diloco-broker status", Peer(Role.OPERATOR, "anna")),
        ("diloco-top", Peer(Role.MONITOR, "display")),
    ):
        found = re.search(rf"{command} --keys (\S+)", said)
        assert found and read_keys(Path(found[1])).peer == peer
    assert str(path) in (path / "README.txt").read_text()


def test_later_calls_add_keys_and_change_none(path: Path) -> None:
    keygen(path, "gpu-0")
    before = {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}
    assert keygen(path, "gpu-1", "--monitor", "wall")[0] == 0
    assert {each: each.read_bytes() for each in before} == before
    assert {Peer(Role.WORKER, "gpu-1"), Peer(Role.MONITOR, "wall")} < peers(path)


def test_name_that_has_a_key_gets_none_and_is_told_how_it_could(path: Path) -> None:
    keygen(path, "GPU-0")
    before = KeyFolder(path).allowed()
    code, said = keygen(path, "new", "GPU-0")
    assert code == 2
    assert KeyFolder(path).allowed() == before, "a key was made before the refusal"
    told = re.search(r"key of the worker GPU-0 exists already.* rm (\S+) (\S+)$", said)
    assert told
    for file in told.groups():
        Path(file).unlink()
    assert keygen(path, "GPU-0")[0] == 0
    assert {key for key, peer in before.by_key.items() if peer == GPU}.isdisjoint(
        KeyFolder(path).allowed().by_key
    )


@pytest.mark.parametrize("name", ["bad/name", "..", ".hidden", "", "x" * 65, "new\nline", "ends."])
def test_bad_name_leaves_nothing_behind(path: Path, name: str) -> None:
    assert keygen(path, "gpu-0", "--operator", name)[0] == 2
    assert not path.exists()


def test_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        code, said = keygen(tmp_path / place, "gpu-0")
        assert (code, said.count("diloco-broker:")) == (2, 1)
        assert str(tmp_path) in said


def test_file_of_the_users_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "README.txt").write_text("mine")
    assert keygen(tmp_path, "gpu-0")[0] == 0
    assert (tmp_path / "README.txt").read_text() == "mine"


def test_keys_without_their_broker_are_not_mixed_with_those_of_a_new_one(path: Path) -> None:
    keygen(path, "gpu-0")
    (path / "broker.key").unlink()
    code, said = keygen(path, "gpu-1")
    assert code == 2
    assert "broker.key" in said
    assert not (path / "broker.key").exists()


@pytest.mark.parametrize("place", ["", "allowed", "allowed/operator"])
def test_folder_in_which_others_may_write_is_refused(path: Path, place: str) -> None:
    keygen(path, "gpu-0")
    (path / place).chmod(0o770)
    with pytest.raises(UsageError, match=r"chmod go-w .*keys"):
        KeyFolder(path)
    assert keygen(path, "gpu-1")[0] == 2
    (path / place).chmod(0o750)
    KeyFolder(path)


def test_folder_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keygen(path, "gpu-0")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    if path.stat().st_uid == 0:  # root's may be gone by
        KeyFolder(path)
        os.chown(path / "allowed", 4712, -1)
    with pytest.raises(UsageError, match="another user"):
        KeyFolder(path)


def test_wrong_broker_key_is_refused(path: Path) -> None:
    KeyFolder.make(path)
    file = path / "broker.key"
    plain = json.loads(file.read_text())
    for wrong, why in (
        ({"role": "worker"}, "role"),
        ({"public": zmq.curve_keypair()[0].decode()}, "do not match"),
    ):
        file.write_text(json.dumps({**plain, **wrong}))
        with pytest.raises(UsageError, match=why):
            KeyFolder(path)


def test_public_key_that_others_may_write_is_ignored(path: Path) -> None:
    folder = KeyFolder.make(path)
    folder.add_all([GPU])
    before = folder.fingerprint()
    (path / "allowed" / "worker" / "GPU-0.pub").chmod(0o620)
    assert folder.fingerprint() != before
    allowed = folder.allowed()
    assert not allowed.by_key
    assert "chmod go-w" in allowed.complaints[0]


def test_new_key_is_not_written_where_others_may_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert keygen(tmp_path, "gpu-0")[0] == 2
    assert not list(tmp_path.rglob("*.key"))


def test_file_that_is_not_a_public_key_is_named_and_ignored(path: Path) -> None:
    folder = KeyFolder.make(path)
    folder.add_all([GPU, Peer(Role.OPERATOR, "anna")])
    workers, operators = path / "allowed" / "worker", path / "allowed" / "operator"
    (operators / "copied.pub").write_bytes((workers / "GPU-0.pub").read_bytes())
    (workers / "empty.pub").touch()
    (workers / "folder.pub").mkdir()
    (workers / "gone.pub").symlink_to("nowhere")
    (workers / "list.pub").write_text("[]")
    os.mkfifo(workers / "pipe.pub")
    (workers / "bad name.pub").write_bytes((operators / "anna.pub").read_bytes())
    allowed = folder.allowed()
    assert set(allowed.by_key.values()) == {GPU, Peer(Role.OPERATOR, "anna")}
    said = "\n".join(allowed.complaints)
    for name in ("copied", "empty", "folder", "gone", "list", "pipe", "bad name"):
        assert f"{name}.pub: " in said


def test_every_way_to_change_a_key_is_seen(path: Path) -> None:
    folder = KeyFolder.make(path)
    folder.add_all([GPU, Peer(Role.WORKER, "other")])
    workers = path / "allowed" / "worker"
    file, link = workers / "GPU-0.pub", path / "elsewhere.pub"
    seen = [folder.fingerprint()]

    def is_seen() -> bool:
        seen.append(folder.fingerprint())
        return seen[-1] != seen[-2]

    file.rename(workers / "renamed.pub")
    assert is_seen()
    assert Peer(Role.WORKER, "renamed") in folder.allowed().by_key.values()
    (workers / "renamed.pub").rename(link)
    assert is_seen()
    file.symlink_to(link)
    assert is_seen()
    assert GPU in folder.allowed().by_key.values()
    copy = path / "copy.pub"
    copy.write_bytes((workers / "other.pub").read_bytes())
    os.utime(copy, ns=(0, link.stat().st_mtime_ns))  # a copy may keep the date
    os.replace(copy, link)  # behind the link
    assert is_seen()
    file.unlink()
    assert is_seen()
    (path / "allowed" / "worker").rename(path / "away")
    assert Role.WORKER not in {each.role for each in folder.allowed().by_key.values()}
