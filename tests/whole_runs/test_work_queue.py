"""The work queue in whole runs: a worker is killed; a script is refused before its first step."""

import pytest

from kit.paths import KIT
from kit.process_kit import Child, Processes

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
