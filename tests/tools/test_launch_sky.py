"""What `diloco-launch sky` writes, read by SkyPilot's parser and run here. No cloud is used."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import yaml
from typer.testing import CliRunner

from diloco_tools.launch.cli import app
from kit.paths import KIT
from kit.process_kit import Child, Processes, execute

ISLANDS = ("8xA100@us-east-1", "4xH100@gcp/us-central1", "L4")
SERVE = "--sync-every 5 --max-rounds 20 --bind tcp://127.0.0.1:* --feed tcp://127.0.0.1:*"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a run with these options, from a folder with the script; returns the run's folder."""

    def write(*words: str, islands: tuple[str, ...] = ISLANDS) -> Path:
        (tmp_path / "code").mkdir()
        monkeypatch.chdir(tmp_path / "code")
        kinds = [word for each in islands for word in ("--island", each)]
        usual = ["sky", "--name", "llama", "--folder", "../run", *kinds, *words]
        script = (str(KIT / "train_script.py"), "1000", str(tmp_path / "island.json"), "0")
        done = CliRunner().invoke(app, [*usual, "--", sys.executable, *script])
        assert done.exit_code == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"Start: sh {tmp_path}/run/start.sh"
        return tmp_path / "run"

    return write


def task(run: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((run / f"{name}.yaml").read_text())
    return found


@pytest.mark.slow
def test_each_machine_gets_the_keys_that_it_needs_and_no_other(
    written: Callable[..., Path],
) -> None:
    run = written()
    mounts = task(run, "broker")["file_mounts"].values()
    assert sorted(mounts) == [str(run / "keys" / name) for name in ("allowed", "broker.key")]
    assert not list((run / "keys" / "allowed").rglob("*.key"))
    for number in range(3):
        island = task(run, f"island-{number}")
        own = str(run / "keys" / "clients" / f"worker-island-{number}.key")
        assert list(island["file_mounts"].values()) == [own]
        assert not run.is_relative_to(island["workdir"])


@pytest.mark.engine
@pytest.mark.timeout(400)  # it imports much
def test_tasks_are_what_skypilot_reads(written: Callable[..., Path]) -> None:
    sky = pytest.importorskip("sky", reason="SkyPilot is not here; `make test-engines` installs it")
    run = written("--nodes-per-island", "2", "--broker-at", "aws/us-east-1")
    broker = sky.Task.from_yaml(str(run / "broker.yaml"))
    (machine,) = broker.resources
    assert (str(machine.cloud), machine.region, machine.use_spot) == ("AWS", "us-east-1", False)
    assert machine.ports == ["8512-8513"]
    with pytest.raises(ValueError, match="DILOCO_SERVER"):  # sky jobs launch --env gives it
        sky.Task.from_yaml(str(run / "island-0.yaml"))
    found = []
    for number in range(3):
        config = task(run, f"island-{number}")
        config["envs"]["DILOCO_SERVER"] = "tcp://10.0.0.1:8512"
        island = sky.Task.from_yaml_config(config)
        (machine,) = island.resources
        assert island.num_nodes == 2 and machine.use_spot
        assert machine.job_recovery["max_restarts_on_errors"] == 100
        cloud = str(machine.cloud) if machine.cloud else None
        found.append((machine.accelerators, cloud, machine.region))
    assert found == [
        ({"A100": 8}, None, "us-east-1"),
        ({"H100": 4}, "GCP", "us-central1"),
        ({"L4": 1}, None, None),
    ]
    # With --help a command of SkyPilot checks its options, and does nothing.
    cli = pytest.importorskip("sky.client.cli.command").cli
    commands = re.findall(
        r"\bsky ((?:launch|jobs launch|status) [^)\n]+)", (run / "start.sh").read_text()
    )
    assert len(commands) == 5
    for command in commands:
        done = click.testing.CliRunner().invoke(cli, [*shlex.split(command), "--help"])
        assert done.exit_code == 0, done.output


def machine(processes: Processes, home: Path, task: dict[str, Any], **variables: str) -> Child:
    """The `run` of a task, on a machine that SkyPilot has prepared: a folder that is its home."""
    for target, source in task["file_mounts"].items():
        place = home / target.removeprefix("~/")
        place.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if Path(source).is_dir() else shutil.copyfile)(source, place)
    given = {name: value for name, value in task.get("envs", {}).items() if value is not None}
    own = {
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NODE_IPS": "127.0.0.1",
    }
    return processes.start(execute, "bash", "-c", task["run"], **given, **variables, **own)


@pytest.mark.slow
def test_commands_of_the_tasks_make_a_run(
    written: Callable[..., Path], processes: Processes, tmp_path: Path
) -> None:
    run = written("--serve", SERVE, islands=("L4",))
    broker = machine(processes, tmp_path / "broker", task(run, "broker"))
    address = broker.says("control ").split("control ")[1].split()[0].rstrip(",;")
    of_island = task(run, "island-0")
    island = machine(processes, tmp_path / "island", of_island, DILOCO_SERVER=address)
    assert island.ends() == 0, island.output
    assert broker.ends() == 0, broker.output
    assert (tmp_path / "broker" / "diloco" / "run" / "final-model.safetensors").exists()
