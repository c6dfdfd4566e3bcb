"""`diloco-launch local`: a broker and the workers of one script, as real processes of this machine."""

import os
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_protocol.feed import Counts, End, LastRound, Snapshot
from diloco_tools.launch.local.run import LocalRun
from diloco_tools.launch.local.status import status_line
from kit.examples import FOLDER
from kit.process_kit import Child, Processes, wait_for

# Each test starts Python and torch several times.
pytestmark = pytest.mark.timeout(240)
WITHIN_S = 120.0
TRAINS_UNTIL_IT_IS_STOPPED = """
import os, threading, torch
from diloco_worker import DiLoCoWorker

print("pid", os.getpid(), flush=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with DiLoCoWorker(model, optimizer) as diloco:
    print("trains", flush=True)
    while not diloco.should_stop:
        model(torch.ones(1, 2)).pow(2).mean().backward()
        optimizer.step()
        threading.Event().wait(0.01)
print("left", flush=True)
"""


def launch(processes: Processes, *words: str) -> Child:
    """The command, with `run` as the folder of its run."""
    return processes.run("-m", "diloco_tools.launch", "local", "--folder", "run", *words)


def write(processes: Processes, script: str) -> str:
    (processes.folder / "script.py").write_text(script)
    return "script.py"


def log(processes: Processes, name: str) -> str:
    file = processes.folder / "run" / "logs" / f"{name}.log"
    return file.read_text() if file.exists() else ""


def pids(processes: Processes, name: str) -> list[int]:
    lines = [line.split() for line in log(processes, name).splitlines()]
    return [int(words[1]) for words in lines if words[:1] == ["pid"]]


@pytest.mark.slow
def test_workers_of_a_script_train_one_model(processes: Processes) -> None:
    script = str(FOLDER / "plain_loop.py")
    made = launch(processes, "-n", "2", "--sync-every", "10", "--", script, "--steps", "40")
    assert made.ends(WITHIN_S) == 0, made.output
    assert "4 rounds, loss" in made.output
    for name in ("w0", "w1"):
        assert "after 4 pushes" in log(processes, name)
    program, *export = shlex.split(made.says("model: ").partition(": ")[2])
    assert Path(program).name == "diloco-broker"
    assert processes.asks(*export) == 0
    assert (processes.folder / "model.safetensors").is_file()


def is_alive(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # a zombie has none
    except OSError:
        return False


@pytest.mark.slow
def test_no_process_outlives_a_restart_or_the_launcher(processes: Processes) -> None:
    command = f"python {write(processes, TRAINS_UNTIL_IT_IS_STOPPED)}; true"
    made = launch(processes, "--sync-every", "10", "--", "sh", "-c", command)
    wait_for(lambda: "closed" in log(processes, "broker"), WITHIN_S)
    os.kill(os.getpgid(pids(processes, "w0")[0]), signal.SIGKILL)  # the shell alone
    wait_for(lambda: len(pids(processes, "w0")) == 2, WITHIN_S)
    first, second = pids(processes, "w0")
    assert not is_alive(first)
    assert is_alive(second)
    wait_for(lambda: [log(processes, n).count("trains") for n in ("w0", "w1")] == [2, 1], WITHIN_S)
    assert "restart 1 of" in made.output
    made.gets(signal.SIGINT)
    assert made.ends(WITHIN_S) == 128 + signal.SIGINT, made.output
    assert not [pid for name in ("w0", "w1") for pid in pids(processes, name) if is_alive(pid)]
    # The shells have ended at once; the scripts had the time to leave the run, which is saved then.
    assert [log(processes, name).splitlines().count("left") for name in ("w0", "w1")] == [1, 1]
    broker = log(processes, "broker")
    assert broker.rindex("w1 leaves") < broker.rindex("Saved the run")
    assert list((processes.folder / "run" / "broker").glob("checkpoint-*"))


@pytest.mark.slow
def test_failing_script_is_restarted_and_its_end_is_shown(processes: Processes) -> None:
    script = write(processes, "raise ValueError('no such data set')")
    made = launch(processes, "-n", "1", "--restarts", "1", "--", script)
    assert made.ends(WITHIN_S) == 1, made.output
    assert log(processes, "w0").count("ValueError: no such data set") == 2
    assert "ValueError: no such data set" in made.output


def test_a_script_that_never_joins_is_named(processes: Processes) -> None:
    made = launch(processes, "-n", "2", "--", write(processes, "print('trained alone')"))
    assert made.ends(WITHIN_S) == 1, made.output
    for name in ("w0", "w1"):
        made.says(f"{name} ended without joining the run")


@pytest.mark.slow
def test_workers_that_end_before_the_first_round_are_a_failure(processes: Processes) -> None:
    script = str(FOLDER / "plain_loop.py")
    made = launch(processes, "-n", "1", "--sync-every", "500", "--", script, "--steps", "5")
    assert made.ends(WITHIN_S) == 1, made.output
    assert "--sync-every" in made.says("No round closed")


def test_worker_has_a_name_shard_and_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_KEYS", "of-another-run.key")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    run = LocalRun(tmp_path, ("train.py",), workers=3, sync_every=50)
    one, other = (run.worker_environment(index) for index in (0, 2))
    assert (one["DILOCO_WORKER_ID"], other["DILOCO_WORKER_ID"]) == ("w0", "w2")
    assert (other["DILOCO_SHARD_INDEX"], other["DILOCO_NUM_SHARDS"]) == ("2", "3")
    assert one["OMP_NUM_THREADS"] == "2"
    assert "DILOCO_KEYS" not in one
    assert one["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run.worker_environment(0)["OMP_NUM_THREADS"] == "7"


def test_status_line_has_rounds_loss_workers_and_what_the_run_waits_for() -> None:
    assert "2 workers" in status_line(None, 2)
    begun = Snapshot(feed=1, sequence=1, epoch="e", counts=Counts(alive=1), waiting_for="for w1")
    assert status_line(begun, 2) == "round 0, 1 of 2 workers, waiting for w1"
    later = replace(
        begun,
        waiting_for=None,
        end=End(max_rounds=9),
        last_round=LastRound(number=4, loss=0.5),
        counts=Counts(alive=2),
    )
    assert status_line(later, 2) == "round 5 of 9, loss 0.5000, 2 of 2 workers"
