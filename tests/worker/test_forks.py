"""Child processes of a training script, such as those of a data loader, keep no connection of their
parent.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco_broker import Broker
from diloco_worker import DiLoCoClient, DiLoCoWorker
from kit.process_kit import PATIENCE_S, Processes, wait_for
from kit.whole_run import make_config

# Seconds that the broker waits for a worker whose connection broke, and a margin.
GRACE_S, SOON_S = 0.5, 15.0


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(make_config(workers=1, sync_every=2, disconnect_grace=GRACE_S)) as made:
        yield made


def members(broker: Broker) -> list[str]:
    with DiLoCoClient(broker.address, timeout=PATIENCE_S) as client:
        return [worker["id"] for worker in client.status()["workers"]]


def say(*words: Any) -> None:
    """Print complete lines, also where two processes write."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def train_with_a_child(server: str) -> None:
    """Join, fork a child that outlives this process, and train without an end."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    with DiLoCoWorker(model, optimizer, server, worker_id="me", timeout=PATIENCE_S) as worker:
        step()
        if os.fork() == 0:
            _be_a_child(server, worker)
        while True:
            step()
            if worker.sync_count in (1, 2):
                say("rounds", worker.sync_count)
            threading.Event().wait(0.01)


def _be_a_child(server: str, inherited: DiLoCoWorker) -> None:
    try:
        with DiLoCoClient(server, timeout=PATIENCE_S) as client:  # a child may open its own
            say("child", os.getpid(), "sees", client.status()["workers"][0]["id"])
        began = time.monotonic()
        inherited.close()
        say("closed in", "no" if time.monotonic() - began < 5 else "much", "time")
        signal.pause()
    finally:
        os._exit(1)


def test_death_of_a_parent_with_a_child_is_seen(broker: Broker, processes: Processes) -> None:
    parent = processes.start(train_with_a_child, broker.address)
    child = int(parent.says("child ").split()[1])
    try:
        assert parent.says("child ").endswith("sees me")
        parent.says("closed in no time")
        assert members(broker) == ["me"], "the child closes nothing of its parent"
        parent.says("rounds 2")
        os.kill(parent.pid, signal.SIGKILL)
        wait_for(lambda: members(broker) == [], SOON_S)
        os.kill(child, 0)  # it still runs
    finally:
        os.kill(child, signal.SIGKILL)


def test_child_program_of_a_worker_inherits_no_socket(broker: Broker) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        DiLoCoWorker(model, optimizer, server=broker.address, timeout=PATIENCE_S),
        subprocess.Popen(
            ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False
        ) as child,
    ):
        assert child.stdin is not None and child.stdout is not None
        os.write(child.stdin.fileno(), b"x")
        assert os.read(child.stdout.fileno(), 1) == b"x", "the child runs, and opens nothing more"
        own = Path(f"/proc/{child.pid}/fd")
        kinds = [os.readlink(each).partition(":")[0] for each in own.iterdir()]
        assert "socket" not in kinds
        assert "anon_inode" not in kinds
        child.kill()
