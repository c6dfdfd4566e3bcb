"""What all experiments share: parts that fail, folders that cannot be, and how a command ends."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from diloco_lab.driver.experiment import Experiment
from diloco_tools.processes import ChildFailed


def fails() -> Iterator[int]:
    yield 2
    raise ChildFailed("w0 died")


def test_part_that_fails_leaves_all_others_and_what_it_had_measured(tmp_path: Path) -> None:
    experiment, failed = Experiment("lab", tmp_path), list[str]()
    parts = {"first": lambda: [1], "bad": fails, "last": lambda: [3]}
    assert experiment.measure(parts, failed.append) == [1, 2, 3]
    assert (failed, experiment.has_failed) == (["bad"], True)
    with pytest.raises(typer.Exit) as ended:
        experiment.end((), (), ())
    assert ended.value.exit_code == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [(ChildFailed("w0 died"), 1), (PermissionError("no"), 2), (KeyboardInterrupt(), 130)],
)
def test_error_ends_the_command_with_its_exit_code(
    error: BaseException, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, Experiment("lab", tmp_path / "made").folder():
        raise error
    assert ended.value.exit_code == code
    assert capsys.readouterr().err.startswith("lab: ")
    assert (tmp_path / "made").is_dir()


def test_broken_promise_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        Experiment("lab", tmp_path).end((), ["a note"], ["w0 lost a step"])
    assert ended.value.exit_code == 1
    assert "BROKEN  w0 lost a step" in capsys.readouterr().out
