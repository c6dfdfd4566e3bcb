"""The history of a run: lines that are bounded, survive a crash, and block no round."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from diloco_broker.storage import history
from diloco_broker.storage.history import ACTIONS, FORMER, HISTORY, HistoryWriter
from kit.process_kit import wait_for


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_lines_are_stamped_and_in_order(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path / "run", "abc")
    for number in range(100):
        writer.add({"kind": "event", "text": str(number)})
    writer.act({"what": "save"})
    writer.add({"kind": "round", "text": "100", "loss": float("nan")})
    writer.close()
    lines = read(tmp_path / "run" / HISTORY)
    assert [line["text"] for line in lines] == [str(n) for n in range(101)]
    assert lines[-1]["loss"] is None
    assert all(line["epoch"] == "abc" and line["at"] > 1e9 for line in lines)
    assert read(tmp_path / "run" / ACTIONS)[0]["what"] == "save"


def test_history_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LONGEST_FILE", 2000)
    writer = HistoryWriter(tmp_path, "abc")
    writer.add({"kind": "start", "mode": "sync", "text": "line -1"})
    for number in range(200):
        writer.add({"kind": "event", "text": f"line {number}"})
        writer.act({"what": f"act {number}"})
        wait_for(lambda: not writer._lines)
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([ACTIONS, HISTORY, FORMER])
    assert (tmp_path / FORMER).stat().st_size < 2200
    former, newest = read(tmp_path / FORMER), read(tmp_path / HISTORY)
    assert former[0]["kind"] == newest[0]["kind"] == "start", "each says of what run it is"
    lines = former[1:] + newest[1:]
    numbers = [int(line["text"].split()[1]) for line in lines]
    assert numbers == list(range(numbers[0], 200)), "the newest, without a gap"
    assert len(read(tmp_path / ACTIONS)) == 200


def test_line_that_a_crash_has_cut_costs_only_itself(tmp_path: Path) -> None:
    (tmp_path / HISTORY).write_text('{"kind": "event", "te')
    writer = HistoryWriter(tmp_path, "abc")
    writer.add({"kind": "event", "text": "after"})
    writer.close()
    last = (tmp_path / HISTORY).read_text().splitlines()[-1]
    assert json.loads(last)["text"] == "after"


def test_folder_that_cannot_be_written_is_counted_and_mended(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file, where the folder should be")
    writer = HistoryWriter(tmp_path / "run", "abc")
    writer.add({"kind": "event", "text": "lost"})
    wait_for(lambda: writer.lost == 1)
    assert writer.error
    (tmp_path / "run").unlink()
    writer.add({"kind": "event", "text": "kept"})
    wait_for(lambda: writer.error is None)
    writer.close()
    assert [line["text"] for line in read(tmp_path / "run" / HISTORY)] == ["kept"]


def test_hanging_disk_blocks_no_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LINES_WAITING", 10)
    monkeypatch.setattr(history, "FINISH_WITHIN_S", 0.05)
    hangs = threading.Event()
    real = HistoryWriter._append

    def append(self: HistoryWriter, line: tuple[str, dict[str, Any]]) -> None:
        hangs.wait(20)
        real(self, line)

    monkeypatch.setattr(HistoryWriter, "_append", append)
    writer = HistoryWriter(tmp_path, "abc")
    for number in range(100):
        writer.add({"kind": "event", "text": str(number)})
    assert writer.lost >= 89, "lines that cannot be queued are counted, not kept"
    writer.close()  # for a bounded time
    hangs.set()
    wait_for(lambda: len(read(tmp_path / HISTORY)) == 100 - writer.lost)
