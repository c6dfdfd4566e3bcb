"""The daemon and training scripts as separate processes: started, killed, stopped, started wrongly."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kit.paths import KIT, ROOT

SCRIPT = KIT / "train_script.py"
PATIENCE_S = 60.0


class Process:
    """A child process whose output is read line by line, each wait bounded."""

    def __init__(self, *command: str, folder: Path, **env: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT / "tests"), **env},
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self._queue.put(line.rstrip())
        self._queue.put(None)

    def waits_for(self, words: str) -> str:
        """The next line that contains these words."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            line = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            assert line is not None, f"it ended without {words!r}:\n" + "\n".join(self.lines)
            self.lines.append(line)
            if words in line:
                return line

    def ends(self, within: float = PATIENCE_S) -> int:
        """Its exit code; the rest of its output is in `lines`."""
        code = self.child.wait(within)
        self._reader.join(5)
        while (line := self._queue.get(timeout=5)) is not None:
            self.lines.append(line)
        return code

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait(10)
        self._reader.join(5)
        assert self.child.stdout is not None
        self.child.stdout.close()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)


class Site:
    """Processes of one test; all are ended with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Process] = []

    def run(self, *command: str, **env: str) -> Process:
        self.processes.append(Process(*command, folder=self.folder, **env))
        return self.processes[-1]

    def broker(self, *options: str, bind: str = "tcp://127.0.0.1:*") -> tuple[Process, str]:
        """A daemon and its address."""
        feed = "tcp://127.0.0.1:*"
        process = self.run("-m", "diloco_broker", "serve", "--bind", bind, "--feed", feed, *options)
        return process, process.waits_for("control ").split()[1]

    def worker(self, name: str, address: str, steps: int, pause: float = 0.0) -> Process:
        return self.run(
            str(SCRIPT),
            str(steps),
            str(self.folder / f"{name}.json"),
            str(pause),
            DILOCO_SERVER=address,
            DILOCO_WORKER_ID=name,
        )

    def asks(self, *words: str) -> int:
        """An operator's command; returns its exit code."""
        return self.run("-m", "diloco_broker", *words).ends()

    def result(self, name: str) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        return loaded


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    for process in site.processes:
        process.close()


def test_two_workers_train_to_the_same_parameters(site: Site) -> None:
    broker, address = site.broker("--workers", "2", "--sync-every", "10")
    workers = [site.worker(name, address, 50) for name in ("a", "b")]
    assert [worker.ends() for worker in workers] == [0, 0]
    a, b = site.result("a"), site.result("b")
    assert a["weights"] == b["weights"]
    assert a["metrics"]["rounds"] == "5"
    broker.child.send_signal(signal.SIGTERM)
    assert broker.ends(10) == 0
    assert "Round 4 closed" in broker.output
    assert "SIGTERM" in broker.output


def a_free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def test_workers_may_start_before_the_broker(site: Site) -> None:
    address = a_free_address()
    worker = site.worker("early", address, 20)
    worker.waits_for("aiting")
    _, bound = site.broker("--sync-every", "10", bind=address)
    assert bound == address
    assert worker.ends() == 0
    assert site.result("early")["metrics"]["rounds"] == "2"


def test_killed_worker_does_not_hold_the_others(site: Site) -> None:
    broker, address = site.broker("--workers", "2", "--sync-every", "5")
    victim = site.worker("victim", address, 100_000, pause=0.01)
    other = site.worker("other", address, 60, pause=0.01)
    broker.waits_for("Round 1 closed")
    victim.child.kill()
    assert other.ends() == 0
    assert site.result("other")["metrics"]["rounds"] == "12"
    broker.child.send_signal(signal.SIGTERM)
    broker.ends(10)
    assert "victim counts as dead" in broker.output


def test_run_goes_on_with_a_broker_that_was_killed_and_started_again(site: Site) -> None:
    address = a_free_address()
    options = ("--workers", "2", "--sync-every", "5", "--no-save")
    first, _ = site.broker(*options, bind=address)
    workers = [site.worker(name, address, 120, pause=0.02) for name in ("a", "b")]
    first.waits_for("Round 3 closed")  # its version may be with nobody yet, that of round 2 is
    first.child.kill()
    first.ends()
    second, _ = site.broker(*options, bind=address)
    begins = second.waits_for("goes on with round")
    number = int(begins.split("round ")[1].split(",")[0])
    assert number >= 3, "rounds are counted on, not from 0"
    assert "with what its workers hold" in begins
    assert begins.split("Run ")[1].split()[0] in first.output, "it is the same run"
    assert [worker.ends() for worker in workers] == [0, 0]
    assert site.result("a")["weights"] == site.result("b")["weights"]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "--restarting"])
def test_run_goes_on_when_the_broker_is_restarted(site: Site, tmp_path: Path, how: str) -> None:
    address, folder = a_free_address(), str(tmp_path / "run")
    options = ("--sync-every", "5", "--workers", "2", "--save-dir", folder)
    first, _ = site.broker(*options, bind=address)
    workers = [site.worker(name, address, 300, pause=0.01) for name in ("a", "b")]
    first.waits_for("Round 3 closed")
    if how == "--restarting":
        assert site.asks("shutdown", "--restarting", "--yes", "--address", address) == 0
    else:
        first.child.send_signal(signal.Signals[how])
    assert first.ends(10) == 0
    second, _ = site.broker(*options, bind=address)
    second.waits_for(f"The run in {folder} goes on when its workers are back.")
    second.waits_for("2 of 2 expected workers averaged")
    assert [worker.ends() for worker in workers] == [0, 0]
    for name in ("a", "b"):
        result = site.result(name)
        assert result["steps"] == 300, "a script that looks at should_stop makes all of its steps"
        assert int(result["metrics"]["rounds"]) > 4


def test_run_that_an_operator_ends_ends_the_scripts_and_stays_ended(site: Site) -> None:
    broker, address = site.broker("--sync-every", "5")
    worker = site.worker("a", address, 100_000, pause=0.01)
    broker.waits_for("Round 1 closed")
    assert site.asks("shutdown", "--yes", "--address", address) == 0
    assert broker.ends(10) == 3, "a service manager can tell it from a restart"
    assert worker.ends() == 0, "should_stop ends the loop"
    assert site.result("a")["steps"] < 100_000
    assert "The run is over" in worker.output


def test_script_without_a_server_trains_alone(site: Site) -> None:
    worker = site.worker("alone", "", 5)
    assert worker.ends() == 0
    assert site.result("alone")["steps"] == 5


def test_model_file_is_where_the_run_begins(site: Site, tmp_path: Path) -> None:
    torch.manual_seed(3)
    shapes = {"0.weight": (32, 8), "0.bias": (32,), "2.weight": (1, 32), "2.bias": (1,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "m.safetensors")
    torch.save(tensors, tmp_path / "m.pt")
    for file in ("m.safetensors", "m.pt"):
        options = ("--sync-every", "10", "--no-save", "--model", str(tmp_path / file))
        broker, address = site.broker(*options)
        assert site.worker(file, address, 3).ends() == 0
        broker.child.send_signal(signal.SIGTERM)
        assert broker.ends(10) == 0
        assert "begins with the parameters of the model file" in broker.output


def test_model_file_of_another_model_is_refused_and_named(site: Site, tmp_path: Path) -> None:
    save_file({"0.weight": torch.zeros(4, 4)}, tmp_path / "m.safetensors")
    _, address = site.broker("--model", str(tmp_path / "m.safetensors"))
    worker = site.worker("a", address, 3)
    assert worker.ends() == 1
    assert "0.weight is [32, 8] in the worker and [4, 4] in the file" in worker.output


def test_wrong_option_is_one_sentence_and_exit_2(site: Site) -> None:
    process = site.run("-m", "diloco_broker", "serve", "--bind", "tcp://0.0.0.0:8512")
    assert process.ends() == 2
    assert "--insecure" in process.output
    assert len(process.lines) == 1, process.output


def test_port_in_use_is_one_sentence_and_exit_2(site: Site) -> None:
    _, address = site.broker()
    process = site.run("-m", "diloco_broker", "serve", "--no-save", "--bind", address)
    assert process.ends() == 2
    assert "something else listens there" in process.output
    assert len(process.lines) == 1


@pytest.mark.timeout(300)
def test_demo_runs_from_end_to_end(site: Site, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    options = ("--steps", "20", "--sync-every", "10", "--out", str(out))
    demo = site.run("-m", "diloco_tools.demo", *options)
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
