"""A process of a worker is killed: the whole worker ends, the run goes on, and it comes back."""

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_worker import DiLoCoWorker
from kit.islands import Island, language
from kit.process_kit import PATIENCE_S, Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

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
    island.ends_well()
    whole.ends_well()
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
    whole.ends_well()
    island.kill()


def train_with_a_frozen_block(kind: str, address: str, name: str, out: str, _: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = language()
    model.layers[0].requires_grad_(requires_grad=False)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    with DiLoCoWorker(
        model, optimizer, server=address, worker_id=name, process_group="world"
    ) as diloco:
        while diloco.sync_count < 8:
            for each in trained:
                each.grad = torch.full_like(each, 1e-3)
            optimizer.step()
            print(f"rounds {diloco.sync_count}", flush=True)
            threading.Event().wait(0.02)


def test_broker_that_lost_everything_gets_it_from_all_processes_of_a_worker(
    processes: Processes, tmp_path: Path
) -> None:
    """Frozen parameters too, of which each process has its share."""
    options = {**OPTIONS, "workers": 1, "max_rounds": None, "recover_wait": 0.1}
    broker = processes.broker(**options)
    address = broker.address()
    island = Island(processes, tmp_path, "ddp", 2, address, "a", script=train_with_a_frozen_block)
    island.ranks[1].says("rounds 3")
    broker.kill()
    processes.broker(**options, bind=address)
    island.ends_well()
