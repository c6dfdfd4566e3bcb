"""The file of a tape: what a broker was told and did, to be replayed elsewhere."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgpack
import pytest
from typer.testing import CliRunner

from diloco_broker.cli.app import app
from diloco_broker.core.events import Now
from diloco_broker.core.tape import FORMAT, Codec, Draws, NotPlain
from diloco_broker.shell.effects import Executor
from diloco_broker.storage import tape_file
from diloco_broker.storage.tape_file import NAME, TapeWriter, read_tape
from diloco_protocol.errors import UsageError
from kit.core_harness import Stage, a_round, a_stage

VERSION = "1.2.3"


def taped(path: Path, longest: int = 1 << 20, **options: Any) -> tuple[Stage, TapeWriter]:
    """A stage that writes a tape."""
    stage = a_stage(2, chunks=2, **options)
    stage.state.draw = Draws(b"a seed")
    tape = TapeWriter(path, stage.core, VERSION, longest)
    stage._executor = Executor(stage.core, lambda: Now.both(stage.now), stage, tape=tape)
    return stage, tape


def trained(path: Path, rounds: int = 3, **options: Any) -> Stage:
    stage, tape = taped(path, **options)
    workers = stage.joined("a", "b")
    for number in range(rounds):
        a_round(workers, number)
        stage.passes(1.0)
        for each in workers:
            each.pulls()
    tape.close()
    return stage


def replayed(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    return result.exit_code, result.output


def test_tape_replays_to_any_round_and_tells_the_story_of_a_worker(tmp_path: Path) -> None:
    trained(tmp_path / "tape")
    assert stat.S_IMODE(os.stat(tmp_path / "tape").st_mode) == 0o600
    code, text = replayed(tmp_path / "tape")
    assert code == 0
    assert VERSION in text and "3 rounds" in text and "all effects are identical" in text
    code, text = replayed(tmp_path / "tape", "--until", "1", "--story", "a")
    assert code == 0
    assert "1 round:" in text
    assert "Join of a" in text and "Join of b" not in text
    assert "Push of a" in text and "Grant" in text


def test_first_difference_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "tape")
    monkeypatch.setattr("diloco_broker.core.rounds.grants.counted", lambda *_: iter(()))
    monkeypatch.setattr("diloco_broker.core.rounds.grants.grant", lambda *_, **__: iter(()))
    code, text = replayed(tmp_path / "tape")
    assert code == 1
    assert "Push of a" in text and "Grant" in text


def test_tape_is_bounded_and_each_file_replays_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "tape"
    trained(path, rounds=200, longest=60_000)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["tape", "tape.1"]
    assert sum(file.stat().st_size for file in files) < 200_000
    for file in files:
        code, text = replayed(file)
        assert code == 0, text
    with read_tape(files[1]) as tape:
        assert tape.core.state.round is not None and tape.core.state.round.number > 5


def test_former_tape_is_kept_when_a_broker_starts_again(tmp_path: Path) -> None:
    trained(tmp_path / "tape", rounds=1)
    trained(tmp_path / "tape", rounds=2)
    assert "1 round:" in replayed(tmp_path / "tape.1")[1]
    assert "2 rounds:" in replayed(tmp_path / "tape")[1]


@pytest.mark.parametrize("cut", [1, 7, 100])
def test_what_a_killed_broker_wrote_is_read_up_to_the_cut(tmp_path: Path, cut: int) -> None:
    trained(tmp_path / "tape")
    whole = (tmp_path / "tape").read_bytes()
    (tmp_path / "tape").write_bytes(whole[:-cut])
    code, text = replayed(tmp_path / "tape")
    assert code == 0 and "all effects are identical" in text


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "is empty"),
        (b"\x01\x02", "not a tape"),
        (b"\xc1\xc1", "not a tape"),
        (b"\x80", "not a tape"),
        (msgpack.packb({NAME: FORMAT, "version": VERSION}), "damaged"),
        (msgpack.packb({NAME: FORMAT + 1, "version": VERSION}), VERSION),
    ],
)
def test_file_that_is_not_a_tape_is_named(tmp_path: Path, content: bytes, word: str) -> None:
    (tmp_path / "other").write_bytes(content)
    code, text = replayed(tmp_path / "other")
    assert code == 2
    assert word in text
    assert replayed(tmp_path / "missing")[0] == 2


def test_tape_makes_nothing_but_records_of_the_core() -> None:
    codec = Codec()
    for title in (
        "os:system",
        "subprocess:Popen",
        "builtins:eval",
        "diloco_broker.core.tape:replay",
        "diloco_broker.storage.tape_file:Path",
    ):
        with pytest.raises(ValueError, match="cannot contain"):
            codec.know([[title, []]])


@pytest.mark.parametrize("plain", [["e", 0, "tcp://127.0.0.1:9"], ["d", 0, 0, []], ["b", 1 << 46]])
def test_tape_calls_no_class_that_it_names(plain: list[Any]) -> None:
    codec = Codec()
    codec.know([["diloco_protocol.messages:Leave", []]])
    try:
        made = codec.thaw(plain)
    except ValueError:
        return
    assert type(made) is dict, "a missing key makes nothing"


def test_shared_objects_are_shared_in_the_copy() -> None:
    codec, inner = Codec(), [1, 2]
    plain = codec.freeze({"a": inner, "b": (inner, 1 << 70), 3: {4, 5}})
    made = codec.thaw(plain)
    assert made == {"a": [1, 2], "b": ([1, 2], 1 << 70), 3: {4, 5}}
    assert made["a"] is made["b"][0]
    with pytest.raises(NotPlain):
        codec.freeze(lambda: None)


@pytest.mark.parametrize("where", ["noted", "written"])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), UnicodeError("x")])
def test_run_goes_on_when_the_tape_cannot_be_written(
    where: str,
    failure: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage, tape = taped(tmp_path / "tape")
    workers = stage.joined("a", "b")

    def full(*_: object) -> int:
        raise failure

    monkeypatch.setattr(tape_file, where, full)
    for number in range(20):
        a_round(workers, number)
        stage.passes(1.0)
    assert stage.version().counter == 20
    tape.close()
    assert "the run continues" in caplog.text


def test_disk_that_is_too_slow_ends_the_tape_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage, tape = taped(tmp_path / "tape")
    goes_on = threading.Event()
    monkeypatch.setattr(tape_file, "written", lambda *_: goes_on.wait() and ())
    workers = stage.joined("a", "b")
    for number in range(300):
        a_round(workers, number)
    assert stage.version().counter == 300
    assert "too slow" in caplog.text
    goes_on.set()
    tape.close()


@pytest.mark.parametrize("what", ["folder", "file", "link"])
def test_file_that_is_not_a_tape_is_not_moved_aside(tmp_path: Path, what: str) -> None:
    path, model = tmp_path / "tape", tmp_path / "model"
    model.write_bytes(b"parameters")
    if what == "folder":
        path.mkdir()
    elif what == "link":
        path.symlink_to(model)
    else:
        path.write_bytes(b"parameters")
    with pytest.raises(UsageError, match="not a tape"):
        taped(path)
    assert model.read_bytes() == b"parameters" and path.exists()
    with pytest.raises(UsageError, match="--tape"):
        taped(tmp_path / "missing" / "tape")


def test_tape_replays_in_another_process(tmp_path: Path) -> None:
    """Hashes of texts, and before Python 3.12 that of None, differ from process to process."""
    trained(tmp_path / "tape")
    command = [sys.executable, "-m", "diloco_broker", "replay", str(tmp_path / "tape")]
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_damage_is_found(tmp_path: Path) -> None:
    trained(tmp_path / "tape")
    whole = (tmp_path / "tape").read_bytes()
    for place in range(60, len(whole), len(whole) // 25):
        damaged = bytearray(whole)
        damaged[place] ^= 0x41
        (tmp_path / "tape").write_bytes(damaged)
        code, text = replayed(tmp_path / "tape")
        assert code == 2, (place, text)
