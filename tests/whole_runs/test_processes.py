"""The daemon and training scripts as separate processes: started, killed, stopped, started wrongly."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kit.process_kit import Processes, a_free_address

pytest_plugins = ("kit.process_fixtures",)


def test_two_workers_train_to_the_same_parameters(processes: Processes) -> None:
    broker, address = processes.serve("--workers", "2", "--sync-every", "10")
    workers = [processes.train(name, address, 50) for name in ("a", "b")]
    assert [worker.ends() for worker in workers] == [0, 0]
    a, b = processes.result("a"), processes.result("b")
    assert a["weights"] == b["weights"]
    assert a["metrics"]["pushes"] == "5"
    broker.gets(signal.SIGTERM)
    assert broker.ends(10) == 0
    assert "Round 4 closed" in broker.output
    assert "SIGTERM" in broker.output


def test_workers_may_start_before_the_broker(processes: Processes) -> None:
    address = a_free_address()
    worker = processes.train("early", address, 20)
    worker.says("aiting")
    _, bound = processes.serve("--sync-every", "10", bind=address)
    assert bound == address
    assert worker.ends() == 0
    assert processes.result("early")["metrics"]["pushes"] == "2"


@pytest.mark.slow
def test_run_goes_on_with_a_broker_that_was_killed_and_started_again(processes: Processes) -> None:
    address = a_free_address()
    options = ("--workers", "2", "--sync-every", "5", "--no-save")
    first, _ = processes.serve(*options, bind=address)
    workers = [processes.train(name, address, 120, pause=0.02) for name in ("a", "b")]
    first.says("Round 3 closed")  # no worker may have its version yet; each has that of round 2
    first.kill()
    first.ends()
    second, _ = processes.serve(*options, bind=address)
    begins = second.says("continues with round")
    number = int(begins.split("round ")[1].split(",")[0])
    assert number >= 3, "rounds are counted on, not from 0"
    assert "from versions of its workers" in begins
    assert begins.split("Run ")[1].split()[0] in first.output, "it is the same run"
    assert [worker.ends() for worker in workers] == [0, 0]
    assert processes.result("a")["weights"] == processes.result("b")["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "--restarting"])
def test_run_goes_on_when_the_broker_is_restarted(
    processes: Processes, tmp_path: Path, how: str
) -> None:
    address, folder = a_free_address(), str(tmp_path / "run")
    options = ("--sync-every", "5", "--workers", "2", "--save-dir", folder)
    first, _ = processes.serve(*options, bind=address)
    workers = [processes.train(name, address, 300, pause=0.01) for name in ("a", "b")]
    first.says("Round 3 closed")
    if how == "--restarting":
        assert processes.asks("shutdown", "--restarting", "--yes", "--address", address) == 0
    else:
        first.gets(signal.Signals[how])
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
        assert "model file" in broker.output


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
