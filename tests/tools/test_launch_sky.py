"""What `diloco-launch sky` writes, read by SkyPilot's parser and run here. No cloud is used."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click.testing
import pytest
import yaml
from typer.testing import CliRunner

from diloco_tools.launch.cli import app
from kit.paths import KIT
from kit.process_kit import PATIENCE_S, wait_for

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


class Machine:
    """A machine as SkyPilot prepares it, in a folder that is its home, and its `run` as a process."""

    def __init__(self, home: Path, task: dict[str, Any], **variables: str) -> None:
        for target, source in task["file_mounts"].items():
            place = home / target.removeprefix("~/")
            place.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if Path(source).is_dir() else shutil.copyfile)(source, place)
        given = {k: v for k, v in task.get("envs", {}).items() if v is not None} | variables
        self._log = home / "run.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", task["run"]],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={
                    **os.environ,
                    **given,
                    "HOME": str(home),
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "SKYPILOT_NUM_NODES": "1",
                    "SKYPILOT_NODE_IPS": "127.0.0.1",
                },
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def ends(self) -> int:
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # also what its shell has started
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    started: list[Machine] = []

    def start(name: str, task: dict[str, Any], **variables: str) -> Machine:
        started.append(Machine(tmp_path / name, task, **variables))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.mark.slow
def test_commands_of_the_tasks_make_a_run(
    written: Callable[..., Path], machines: Callable[..., Machine]
) -> None:
    run = written("--serve", SERVE, islands=("L4",))
    broker = machines("broker", task(run, "broker"))
    words = wait_for(lambda: [line for line in broker.output.splitlines() if "control " in line])
    address = words[0].split("control ")[1].split()[0].rstrip(",;")
    island = machines("island", task(run, "island-0"), DILOCO_SERVER=address)
    assert island.ends() == 0, island.output
    assert broker.ends() == 0, broker.output
    assert (run.parent / "broker" / "diloco" / "run" / "final-model.safetensors").exists()
