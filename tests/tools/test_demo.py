"""The demo: what it trains on, what it reports, and how it treats bad input and dying children."""

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from diloco_tools.demo.cli import app
from diloco_tools.demo.data import DataError, Document, load_text, split_documents, training_batches
from diloco_tools.demo.experiment import same_tokens_options
from diloco_tools.demo.train import parse_arguments, train
from diloco_tools.processes import ChildFailed, Children, JsonLines, environment, wait_for_line
from diloco_tools.terminal import installed
from kit.tool_results import RESULTS, SETTINGS
from kit.top_text import matches


def a_text(tmp_path: Path, size: int) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes((b"the quick brown fox jumps over the lazy dog. " * (size // 45 + 1))[:size])
    return path


# The text.


@pytest.mark.parametrize(("count", "sizes"), [(2, [95, 95]), (3, [64, 63, 63])])
def test_a_twentieth_is_held_out_and_the_rest_is_sharded(count: int, sizes: list[int]) -> None:
    given = [Document(f"file{i:03}", bytes([i + 1]) * 100) for i in range(200)]
    held_out, shards = split_documents(given, count)
    assert [len(shard) for shard in shards] == sizes
    assert held_out == split_documents(given, 4)[0] and len(held_out) == 10
    names = [document.name for part in (held_out, *shards) for document in part]
    assert sorted(names) == [document.name for document in given], "none is lost or in two parts"


def test_a_single_file_is_split_in_pieces_that_make_it_up_again() -> None:
    text = bytes(range(256)) * 40
    held_out, shards = split_documents([Document("book", text)], 2)
    parts = [held_out, *shards]
    pieces = {document.name: document.text for part in parts for document in part}
    in_order = sorted(pieces, key=lambda name: int(name.split("[")[1].split(":")[0]))
    assert b"".join(pieces[name] for name in in_order) == text
    assert all(parts)


def test_missing_empty_and_small_text_each_get_one_sentence(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    for path, words in [
        (tmp_path / "missing", "does not exist"),
        (empty, "holds no text"),
        (a_text(tmp_path, 2000), "the held-out text has only 134 bytes and needs 520"),
    ]:
        with pytest.raises(DataError, match=rf"\A.*{words}.*--data.*\Z"):
            load_text(path, 2, 64)


def test_batches_are_windows_of_the_text_and_targets_are_one_byte_later() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    (tokens, targets), (again, _), (other, _) = (
        next(training_batches(text, batch=4, context=8, seed=seed)) for seed in (1, 1, 2)
    )
    assert tokens.shape == targets.shape == (4, 8)
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, other)
    first, last = next(training_batches(text[:10], batch=200, context=8, seed=1))
    assert (int(first.min()), int(last.max())) == (0, 9), "the first and the last byte"


# The model and its training.


def test_script_trains_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DILOCO_SERVER", raising=False)
    log = tmp_path / "log.jsonl"
    options = f"train --log {log} --data {a_text(tmp_path, 10_000)} --steps 12 --batch 4"
    monkeypatch.setattr(sys, "argv", [*options.split(), "--context", "16", "--eval-every", "6"])
    train(parse_arguments())
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["step"] for record in records] == [5, 6, 10, 12, 12]
    assert [record["step"] for record in records if "val_loss" in record] == [6, 12]
    assert records[3]["val_loss"] < records[1]["val_loss"]
    assert records[-1]["done"]
    assert records[-1]["sync_metrics"]["bytes_up"] == 0


# What is reported.


def test_summary_is_the_stored_one() -> None:
    matches("demo_summary.json", json.dumps(RESULTS, indent=1))


def test_baseline_with_the_same_tokens_sees_as_much_text_as_all_workers_together() -> None:
    settings = replace(SETTINGS, workers=3, batch=8)
    words = same_tokens_options(settings)
    assert words[words.index("--batch") + 1] == "24"
    assert "--server" not in words
    assert RESULTS["same_tokens"]["tokens"] == RESULTS["diloco"]["tokens"]
    assert RESULTS["diloco"]["tokens"] == SETTINGS.workers * RESULTS["single"]["tokens"]


def test_watch_command_is_one_of_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "an env" / "bin"
    folder.mkdir(parents=True)
    (folder / "diloco-top").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "")
    assert installed("diloco-top") == f"'{folder}/diloco-top'"
    monkeypatch.chdir(tmp_path)
    assert installed("diloco-top") == "'an env/bin/diloco-top'"
    monkeypatch.setenv("PATH", str(folder))
    assert installed("diloco-top") == "diloco-top"


# Commands and children.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "110", "--sync-every", "25"], "take 100 steps"),
        (["--workers", "0"], "--workers must be positive"),
        (["--data", "/nonexistent"], "does not exist"),
    ],
)
def test_bad_options_give_one_sentence(arguments: list[str], words: str, tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["--out", str(tmp_path / "out"), *arguments])
    assert answer.exit_code == 2
    assert words in answer.stderr
    assert answer.stderr.startswith("diloco-demo: ")
    assert answer.stderr.count("\n") == 1


def test_children_are_ended_when_something_goes_wrong(tmp_path: Path) -> None:
    script = "import os, time; print('ready', os.getpid(), flush=True); time.sleep(600)"
    forever = ["sh", "-c", f'"{sys.executable}" -c "{script}"; true']
    with (  # noqa: PT012  the children have to be there when it goes wrong
        pytest.raises(RuntimeError, match="anything"),
        Children(tmp_path) as children,
    ):
        child = children.start("broker", forever)
        started = int(wait_for_line(child, "ready", 20))
        assert started != child.pid
        raise RuntimeError("anything")
    assert not child.running
    with contextlib.suppress(OSError):  # else its entry is gone
        assert not Path(f"/proc/{started}/cmdline").read_bytes(), "only a zombie has none"


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ("sys.exit('port in use')", "died with exit code 1"),
        ("print('port in use')", "ended before its work was done"),
        ("print('port in use', flush=True); os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
)
def test_child_that_ends_early_is_named_with_its_log(tmp_path: Path, last: str, told: str) -> None:
    script = f"import os, sys; print('step 1'); {last}"
    with Children(tmp_path) as children:
        child = children.start("broker", [sys.executable, "-c", script])
        with pytest.raises(ChildFailed, match=rf"^broker {told}") as failed:
            wait_for_line(child, "control", 20)
    assert "step 1" in str(failed.value) and "port in use" in str(failed.value)


def test_children_do_not_inherit_settings_of_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_SERVER", "tcp://10.0.0.1:8512")
    monkeypatch.setenv("SOMETHING_ELSE", "stays")
    assert "DILOCO_SERVER" not in environment()
    assert environment()["SOMETHING_ELSE"] == "stays"


def test_a_line_is_read_when_it_is_whole_and_only_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = JsonLines(path)
    assert lines.new() == []
    path.write_text('{"step": 1}\n{"st')
    assert lines.new() == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert lines.new() == [{"step": 2}]
    assert lines.new() == []
