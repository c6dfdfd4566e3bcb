"""A broker that moves to another address, and those who follow it by a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco_worker import DiLoCoClient
from kit.process_kit import Processes

pytest_plugins = ("kit.process_fixtures",)


@pytest.mark.slow
def test_worker_follows_a_broker_that_moves(processes: Processes, tmp_path: Path) -> None:
    file = tmp_path / "address"
    known = f"file://{file}"
    worker = processes.train("a", known, 200, pause=0.01)
    worker.says(f"the file {file} is not there yet; waiting for diloco-broker serve --address-file")
    options = ("--sync-every", "5", "--save-dir", "run", "--address-file", str(file))
    first, here = processes.serve(*options)
    assert file.read_text().splitlines()[0] == here
    first.says("Round 3 closed")
    with DiLoCoClient(known, timeout=30.0) as client:
        assert client.pull().version.counter >= 3
    first.kill()
    file.write_text("")  # as somebody writes it who has no way to replace it
    second, there = processes.serve(*options)
    assert there != here
    assert processes.asks("status", "--address", known) == 0
    second.says("expected workers averaged")
    assert worker.ends() == 0, worker.output
    result = processes.result("a")
    assert result["steps"] == 200
    assert int(result["metrics"]["rounds"]) > 10
    assert all(torch.isfinite(torch.tensor(result["weights"])))
