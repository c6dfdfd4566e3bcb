"""The daemon and training scripts as processes: started, killed, stopped, moved, and at their end."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diloco_worker import DiLoCoClient
from kit.paths import KIT
from kit.process_kit import Child, Processes, a_free_address


@pytest.mark.slow
def test_run_goes_on_when_a_broker_restarts(processes: Processes, tmp_path: Path) -> None:
    address, folder = a_free_address(), str(tmp_path / "run")
    options = ("--sync-every", "5", "--workers", "2", "--save-dir", folder)
    first, _ = processes.serve(*options, bind=address)
    workers = [processes.train(name, address, 300, pause=0.01) for name in ("a", "b")]
    first.says("Round 3 closed")
    assert processes.asks("shutdown", "--restarting", "--yes", "--address", address) == 0
    assert first.ends(10) == 0
    second, _ = processes.serve(*options, bind=address)
    assert "Resuming the run of" in second.says(f"(in {folder})")
    second.says("2 of 2 expected workers averaged")
    assert [worker.ends() for worker in workers] == [0, 0]
    for name in ("a", "b"):
        result = processes.result(name)
        assert result["steps"] == 300, "a script that looks at should_stop makes all of its steps"
        assert int(result["metrics"]["pushes"]) > 4


@pytest.mark.slow
def test_run_that_an_operator_ends_ends_the_scripts_and_stays_ended(processes: Processes) -> None:
    broker, address = processes.serve("--sync-every", "5")
    worker = processes.train("a", address, 100_000, pause=0.01)
    broker.says("Round 1 closed")
    assert processes.asks("shutdown", "--yes", "--address", address) == 0
    assert broker.ends(10) == 3, "a service manager can tell it from a restart"
    assert worker.ends() == 0, "should_stop ends the loop"
    assert processes.result("a")["steps"] < 100_000
    assert "The run is over" in worker.output


@pytest.mark.slow
def test_model_file_is_where_the_run_begins(processes: Processes, tmp_path: Path) -> None:
    torch.manual_seed(3)
    shapes = {"0.weight": (32, 8), "0.bias": (32,), "2.weight": (1, 32), "2.bias": (1,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "m.safetensors")
    torch.save(tensors, tmp_path / "m.pt")
    for file in ("m.safetensors", "m.pt"):
        options = ("--sync-every", "10", "--no-save", "--model", str(tmp_path / file))
        broker, address = processes.serve(*options)
        assert processes.train(file, address, 3).ends() == 0
        broker.gets(signal.SIGTERM)
        assert broker.ends(10) == 0
        assert "model file" in broker.output and "SIGTERM" in broker.output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demo_runs_from_end_to_end(processes: Processes, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    small = ("--steps", "20", "--sync-every", "10", "--batch", "2", "--context", "16")
    demo = processes.run("-m", "diloco_tools.demo", *small, "--out", str(out))
    assert demo.ends(240) == 0, demo.output
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["diloco"]["workers"], summary["diloco"]["rounds"]) == (2, 2)
    assert summary["diloco"]["val_loss"] < 6
    assert summary["single"]["val_loss"] < 6
    parameters = summary["parameters"]
    assert summary["bytes"]["data_parallel"] == 20 * 2 * parameters * (2 + 4)
    # Two pushes of each worker in bf16 and the first parameters in fp32, and a few headers.
    chunks = 2 * 2 * parameters * 2 + parameters * 4
    assert chunks < summary["bytes"]["up"] < chunks * 1.01
    assert (out / "loss.png").stat().st_size > 10_000
    assert (out / "log.jsonl").read_text().count("\n") > 4


def test_workers_finish_the_last_round_and_the_broker_leaves_the_model(
    processes: Processes, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    options = ("--workers", "2", "--sync-every", "6", "--max-rounds", "4")
    broker, address = processes.serve(*options, "--save-dir", str(folder))
    workers = [processes.train(name, address, steps=100_000) for name in "ab"]
    for worker in workers:
        worker.says("stops: The run is over: ")
        assert worker.ends() == 0
    assert broker.ends() == 0
    final = load_file(folder / "final-model.safetensors")
    assert len(final) == 4
    a, b = processes.result("a"), processes.result("b")
    assert a["weights"] == b["weights"]
    sums = [final[name].double().sum().item() for name in ("0.weight", "0.bias")]
    assert a["weights"][:2] == pytest.approx(sums, abs=1e-5)
    for result in (a, b):
        assert (result["steps"], result["metrics"]["pushes"]) == (24, "4")


# Each contribution is worth 1 / workers, and counts whole or not at all.
SUMS = ("--mode", "async", "--outer", "sgd", "--outer-lr", "2", "--workers", "2")


@pytest.mark.slow
def test_each_unit_counts_once_an_epoch_though_a_worker_is_killed(processes: Processes) -> None:
    _, address = processes.serve(*SUMS, "--sync-every", "4", "--wire-dtype", "fp32")

    def trains(name: str) -> Child:
        return processes.run(
            *(str(KIT / "queue_script.py"), "60", "2", "0.02"),
            DILOCO_SERVER=address,
            DILOCO_WORKER_ID=name,
        )

    one, other = trains("one"), trains("other")
    other.says("step 2 ")
    one.says("step 6 ")  # the second cycle has begun
    one.kill()
    assert other.ends() == 0
    assert "counts [2]" in other.output


def may_make_namespaces() -> bool:
    words = ["unshare", "--mount", "--net", "true"]
    if shutil.which(words[0]) is None:
        return False
    return subprocess.run(words, check=False, capture_output=True, timeout=20).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not may_make_namespaces(), reason="no namespaces can be made here")
def test_name_is_looked_up_anew_with_each_connection(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    own = f"ip link set lo up && mount --bind {hosts} /etc/hosts && exec"
    script = f"{own} {sys.executable} {KIT / 'moving_name.py'}"
    words = ["unshare", "--mount", "--net", "sh", "-c", script]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    told = ["answers at tcp://127.0.0.2:18777", "answers at tcp://127.0.0.3:18777"]
    assert done.stdout.splitlines() == told


# A broker that moves to another address, and a worker that follows it by a file.


@pytest.mark.slow
def test_worker_follows_a_broker_that_moves(processes: Processes, tmp_path: Path) -> None:
    file = tmp_path / "address"
    known = f"file://{file}"
    worker = processes.train("a", known, 200, pause=0.01)
    worker.says(f"the file {file} does not exist yet; waiting for ")
    options = ("--sync-every", "5", "--save-dir", "run", "--address-file", str(file))
    first, here = processes.serve(*options)
    assert file.read_text().splitlines()[0] == here
    first.says("Round 3 closed")
    with DiLoCoClient(known, timeout=30.0) as client:
        assert client.pull().version.counter >= 3
    first.kill()
    file.write_text("")  # as a script does that cannot replace the file
    second, there = processes.serve(*options)
    assert there != here
    assert processes.asks("status", "--address", known) == 0
    second.says("expected workers averaged")
    assert worker.ends() == 0, worker.output
    result = processes.result("a")
    assert result["steps"] == 200
    assert int(result["metrics"]["pushes"]) > 10
    assert all(torch.isfinite(torch.tensor(result["weights"])))
