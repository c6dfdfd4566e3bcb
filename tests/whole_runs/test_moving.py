"""A broker that moves to another address, and those who follow it by a file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diloco_worker import DiLoCoClient
from kit.paths import KIT
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
