"""The work queue in whole runs: a worker is killed; a script is refused before its first step."""

from __future__ import annotations

import pytest
import torch

from diloco_protocol import UsageError
from diloco_worker import DiLoCoWorker
from diloco_worker.data import WorkQueue
from kit.paths import KIT
from kit.process_kit import Child, Processes
from kit.sites import Sites

pytest_plugins = ["kit.process_fixtures"]

SCRIPT = str(KIT / "queue_script.py")
# Each contribution is worth 1 / workers, and counts whole or not at all.
SUMS = ("--mode", "async", "--outer", "sgd", "--outer-lr", "2", "--workers", "2")


@pytest.mark.slow
def test_each_unit_counts_once_an_epoch_though_a_worker_is_killed(processes: Processes) -> None:
    _, address = processes.serve(*SUMS, "--sync-every", "4", "--wire-dtype", "fp32")

    def trains(name: str) -> Child:
        return processes.run(
            SCRIPT, "60", "2", "0.02", DILOCO_SERVER=address, DILOCO_WORKER_ID=name
        )

    one, other = trains("one"), trains("other")
    other.says("step 2 ")
    one.says("step 6 ")  # the second cycle has begun
    one.kill()
    assert other.ends() == 0
    assert "counts [2]" in other.output


@pytest.mark.parametrize("is_made_first", [True, False])
def test_queue_behind_a_relay_is_refused_before_the_first_step(is_made_first: bool) -> None:
    model = torch.nn.Linear(2, 1)
    with Sites(lambda: torch.nn.Linear(2, 1)) as sites:
        relay = sites.relay(sites.hub(1), 1, "north")
        diloco = DiLoCoWorker(
            model, torch.optim.SGD(model.parameters(), lr=0.1), server=relay.address
        )

        def begin() -> None:
            if is_made_first:
                WorkQueue(diloco, "text", 5)
            with diloco:
                if not is_made_first:
                    WorkQueue(diloco, "text", 5)
                pytest.fail("training began")

        with pytest.raises(UsageError, match="relay"):
            begin()
