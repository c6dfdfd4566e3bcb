"""`diloco-launch`: wrong use of each launcher gets a sentence, and writes nothing."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco_tools.launch.cli import app

KUBERNETES = ("--islands", "2", "--broker-image", "b", "--worker-image", "w")
SLURM = ("--islands", "2")
ISLAND = ("--island", "L4")


@pytest.mark.parametrize(
    ("launcher", "words", "sentence"),
    [
        ("local", ("nothing.py",), "nothing.py"),
        ("local", ("no-such-program",), "no-such-program"),
        ("local", ("--serve", "--save-dir there", "script.py"), "--folder"),
        ("local", ("--serve", "--no-such-option 1", "script.py"), "--no-such-option"),
        ("kubernetes", (*KUBERNETES, "--name", "Llama"), "'Llama' is invalid"),
        ("kubernetes", (*KUBERNETES, "--name", "x" * 41), "at most 40"),
        ("kubernetes", (*KUBERNETES, "--storage", "20 GB"), "'20 GB' is invalid"),
        ("kubernetes", (*KUBERNETES, "--worker-image", ""), "'' is invalid"),
        ("kubernetes", (*KUBERNETES, "--serve", "--quorum 9"), "rejects these options"),
        ("kubernetes", (*KUBERNETES, "--serve", "--fresh"), "--fresh"),
        ("kubernetes", (*KUBERNETES, "--serve", "'"), "cannot be parsed"),
        ("sky", ("--island", "8A100 us-east-1"), "expected GPUs and a place, such as 8xA100@"),
        ("sky", ("--island", "0xA100"), "'0xA100' is invalid"),
        ("sky", ("--island", "8xA100@"), "'8xA100@' is invalid"),
        ("sky", (*ISLAND, "--name", "Llama"), "'Llama' is invalid"),
        ("sky", (*ISLAND, "--broker-cpus", "two"), "'two' is invalid"),
        ("sky", (*ISLAND, "--folder", "run"), "give a --folder outside it"),
        ("sky", (*ISLAND, "--serve", "--quorum 9"), "rejects these options"),
        ("slurm", (*SLURM, "--time", "soon"), "'soon' is invalid"),
        ("slurm", (*SLURM, "--name", "a/b"), "'a/b' is invalid"),
        ("slurm", (*SLURM, "--sbatch", "gpu"), "'gpu' is not an option of sbatch"),
        ("slurm", (*SLURM, "--serve", "--sync-evry 5"), "No such option"),
        ("slurm", (*SLURM, "--folder", "a%b"), "characters"),
        ("slurm", SLURM, "Missing argument 'COMMAND...'"),
        ("slurm", ("status", "nowhere"), "give the folder of a run"),
        ("slurm", ("stop", "nowhere"), "give the folder of a run"),
    ],
)
def test_wrong_use_gets_a_sentence_and_writes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    words: tuple[str, ...],
    sentence: str,
) -> None:
    here, home = tmp_path / "here", tmp_path / "home"
    for folder in (here, home):
        folder.mkdir()
    (here / "script.py").touch()
    monkeypatch.chdir(here)
    has_command = launcher == "local" or words == SLURM or "nowhere" in words
    command = () if has_command else ("--", "true")
    environment = {"COLUMNS": "200", "HOME": str(home)}
    done = CliRunner().invoke(app, [launcher, *words, *command], env=environment)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert sentence in done.stderr
    assert [each.name for each in (*here.iterdir(), *home.iterdir())] == ["script.py"]
