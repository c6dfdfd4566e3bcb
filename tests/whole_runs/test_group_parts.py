"""Two workers in one launch: each is a part of a larger mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from diloco_worker import DiLoCoWorker
from kit.islands import a_batch, language
from kit.process_kit import Processes, a_free_address

pytestmark = pytest.mark.slow
pytest_plugins = ("kit.process_fixtures",)

COUNT, STEPS = 4, 9


def train_in_a_part(address: str, out: str) -> None:
    """Processes 0 and 1 are one worker, 2 and 3 another."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "dp"))
    rank, worker = dist.get_rank(), mesh.get_local_rank("worker")
    model = language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    name = f"worker-{worker}"
    with DiLoCoWorker(
        model, optimizer, server=address, worker_id=name, process_group=mesh["dp"]
    ) as diloco:
        for step in range(STEPS):
            words = a_batch(name, step)
            loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
    assert diloco.worker_id == name
    torch.save({"model": model.state_dict(), "rounds": diloco.sync_count}, f"{out}.{rank}")


def test_parts_of_a_mesh_are_workers_of_one_run(processes: Processes, tmp_path: Path) -> None:
    broker = processes.broker(workers=2, sync_every=3, save_dir=None, chunk_elements=777)
    place = {
        "WORLD_SIZE": str(COUNT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": a_free_address().rpartition(":")[2],
    }
    out = str(tmp_path / "out")
    ranks = [
        processes.start(train_in_a_part, broker.address(), out, RANK=str(rank), **place)
        for rank in range(COUNT)
    ]
    for each in ranks:
        assert each.ends() == 0, each.output
    first, *others = (torch.load(f"{out}.{rank}", weights_only=True) for rank in range(COUNT))
    assert first["rounds"] == STEPS // 3
    for other in others:
        for name, value in first["model"].items():
            assert other["model"][name].equal(value), name
    assert "2 of 2 expected" in broker.output
