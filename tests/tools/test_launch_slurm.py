"""What `diloco-launch slurm` writes and refuses; tests/engines has what a real Slurm makes of it."""

import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from diloco_tools.launch.cli import app
from diloco_tools.launch.slurm import folder as folders
from diloco_tools.launch.slurm.scripts import SlurmRun, broker_script, islands_script

PRINTABLE = st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp"))
TEXT = st.text(PRINTABLE, min_size=1, max_size=20)


def a_run(**given: object) -> SlurmRun:
    usual = {
        "name": "llama",
        "folder": Path("/shared/runs/llama"),
        "start_in": Path("/home/anna"),
        "python": "/opt/venv/bin/python",
        "command": ("torchrun", "--nproc-per-node=8", "train.py"),
        "islands": 4,
        "nodes": 2,
        "serve": ("--sync-every", "500"),
        "sbatch": ("--partition=gpu", "--gpus-per-node=8"),
    }
    return SlurmRun(**{**usual, **given})  # type: ignore[arg-type]


def is_bash(script: str) -> bool:
    done = subprocess.run(
        ["bash", "-n"], input=script, text=True, capture_output=True, check=False, timeout=20
    )
    return done.returncode == 0 and not done.stderr


def test_islands_are_an_array_that_knows_its_run() -> None:
    script = islands_script(a_run())
    assert is_bash(script)
    for line in (
        "#SBATCH --array=0-3",
        "#SBATCH --nodes=2",
        "#SBATCH --requeue",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --signal=B:TERM@120",
        "export DILOCO_SERVER=file://$folder/address",
        "export DILOCO_SHARD_INDEX=$SLURM_ARRAY_TASK_ID DILOCO_NUM_SHARDS=4",
    ):
        assert line in script.splitlines(), line
    assert "torchrun --nproc-per-node=8 train.py &" in script
    first = script.index("\n#SBATCH")
    assert "\n\n" not in script[:first], "sbatch reads its options up to the first command"


def test_broker_is_one_job_with_the_options_of_the_user_last() -> None:
    script = broker_script(a_run(broker_sbatch=("--partition=cpu",)))
    assert is_bash(script)
    assert "#SBATCH --partition=cpu" in script.splitlines()
    assert "--gpus-per-node" not in script
    assert "--workers 4 --keys /shared/runs/llama/keys" in script
    assert script.index("--save-dir") < script.index("--sync-every 500 &")


@given(words=st.lists(TEXT, min_size=1, max_size=4), path=TEXT)
def test_words_of_the_user_reach_the_command_as_they_are(words: list[str], path: str) -> None:
    run = a_run(command=tuple(words), folder=Path("/shared") / path.replace("/", "_"))
    for script in (islands_script(run), broker_script(run)):
        assert is_bash(script)
    start = islands_script(run)
    line = start[start.index("--label ") + len("--label ") : start.index(" &\nchild=$!")]
    command = ["bash", "-c", f"printf '%s\\0' {line}"]
    assert subprocess.check_output(command, timeout=20).decode().split("\0")[:-1] == words


@pytest.mark.slow
def test_settings_come_back_from_their_file(tmp_path: Path) -> None:
    run = a_run(folder=tmp_path / "run", start_in=tmp_path, islands=1)
    folders.write(run)
    assert folders.read(run.folder) == run
    keys = list((run.folder / "keys").rglob("*.key"))
    assert {file.name for file in keys} >= {
        "broker.key",
        "worker-island-0.key",
        "operator-launcher.key",
    }
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in keys)
    before = {file: file.read_bytes() for file in keys}
    (run.folder / "stop").touch()
    folders.write(a_run(folder=run.folder, start_in=tmp_path, islands=2))
    assert {file: file.read_bytes() for file in keys} == before, "a key that is there stays"
    assert (run.folder / "keys" / "clients" / "worker-island-1.key").exists()
    assert not (run.folder / "stop").exists()


@pytest.mark.slow
def test_scripts_are_written_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["slurm", "--islands", "1", "--submit", "--", "true"]
    done = CliRunner().invoke(app, words, env={"PATH": str(tmp_path)})
    assert done.exit_code == 2
    assert "sbatch is missing" in done.stderr
    assert (tmp_path / "runs" / "diloco" / "islands.sh").exists()
