"""What fuzzing has kept still does no harm, nor some inputs drawn now; a failure is written down."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from fuzz import __main__ as fuzz
from fuzz.draws import Draws
from kit.paths import ROOT


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_corpus_and_inputs_like_it_do_no_harm(target: str) -> None:
    run = import_module(f"fuzz.{target}").run
    known = fuzz.corpus(target)
    assert len(known) >= 10
    messages = sum(run(fuzz.drawn(target, 1, number, known)) for number in range(len(known) + 10))
    assert messages > len(known)


@pytest.mark.slow
def test_live_broker_hears_anything_and_goes_on() -> None:
    sent, _ = import_module("fuzz.live").run(seed=1, messages=600, seconds=60)
    assert sent >= 600


def test_live_broker_replays_no_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", "live", "--replay", "any"])
    with pytest.raises(SystemExit):
        fuzz.main()
    assert "no file; say --inputs N --seed S again" in capsys.readouterr().err


def test_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in fuzz.CORPUS.glob("*/*")) < 200_000


def test_choices_of_the_same_bytes_are_the_same_and_their_end_is_the_first_choice() -> None:
    one, other = Draws(b"\x05\x01\x02"), Draws(b"\x05\x01\x02")
    for draws in (one, other):
        assert draws.below(4) == 1 and draws.below(1000) == 0x0201 % 1000
        assert draws.is_used_up and draws.one_of("abc") == "a"


def test_failing_input_is_written_and_the_command_that_replays_it_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzz, "FOUND", tmp_path / "found")

    def run(data: bytes) -> int:
        assert b"\x07" not in data
        return 1

    assert not fuzz.draw("machine", run, 1, 1000, 60.0)
    (path,) = (tmp_path / "found").iterdir()
    assert b"\x07" in path.read_bytes()
    assert f"python -m fuzz machine --replay {path}" in capsys.readouterr().out
    with pytest.raises(AssertionError):
        run(path.read_bytes())


@pytest.mark.slow
def test_target_is_run_in_a_process_of_its_own_and_says_what_it_did() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", "decoding", "--seconds", "1", "--seed", "3"],
        env={"PYTHONPATH": str(ROOT / "tests"), "PATH": ""},
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "decoding: " in done.stdout and "seed 3" in done.stdout and "no fault" in done.stdout
    assert ("guided" in done.stdout) == fuzz.has_atheris()
