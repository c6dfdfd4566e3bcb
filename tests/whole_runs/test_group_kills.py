"""A process of a worker is killed: the whole worker ends, the run goes on, and it comes back."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from kit.islands import Island
from kit.process_kit import PATIENCE_S, Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
pytest_plugins = ("kit.process_fixtures",)

OPTIONS: dict[str, Any] = {
    "sync_every": 3,
    "workers": 2,
    "min_workers": 1,
    "max_rounds": 30,
    "disconnect_grace": 0.2,
    "chunk_elements": 777,
    "save_dir": None,
}


@pytest.mark.parametrize(
    ("phase", "rank"),
    [("freezing", 0), ("pushing", 1), ("waiting", 0), ("merging", 1)],
    ids=["freezing-leader", "pushing-other", "waiting-leader", "merging-other"],
)
def test_killed_process_ends_its_worker_which_comes_back(
    processes: Processes, tmp_path: Path, phase: str, rank: int
) -> None:
    broker = processes.broker(**OPTIONS)
    address = broker.address()
    whole = Island(processes, tmp_path, "plain", 1, address, "whole", pause=0.02)
    island = Island(
        processes, tmp_path, "fsdp", 2, address, "island", dies_in=phase, dies_as=rank, pause=0.02
    )
    codes = island.ends()
    assert codes[rank] == -9, island.ranks[rank].output
    survivor = island.ranks[1 - rank]
    assert codes[1 - rank] not in (0, -9), survivor.output
    assert "of this worker" in survivor.output or "onnection closed" in survivor.output
    island.start()
    assert island.ends() == [0, 0], "\n".join(each.output for each in island.ranks)
    assert whole.ends() == [0], whole.ranks[0].output
    assert broker.ends(PATIENCE_S) == 0, broker.output
    assert "2 of 2 expected" in broker.output
    assert len({(each["steps"], each["rounds"]) for each in island.results()}) == 1


def test_leader_that_is_killed_is_let_go_though_its_other_processes_live(
    processes: Processes, tmp_path: Path
) -> None:
    """Their connections to the broker are no sign of life of the worker."""
    broker = processes.broker(**OPTIONS)
    address = broker.address()
    island = Island(processes, tmp_path, "ddp", 2, address, "island", pause=0.02)
    whole = Island(processes, tmp_path, "plain", 1, address, "whole", pause=0.02)
    broker.says("Round 3 closed")
    island.ranks[1].gets(signal.SIGSTOP)  # it cannot see that its leader is gone
    island.ranks[0].kill()
    broker.says("island counts as dead")
    assert whole.ends() == [0]
    island.kill()
