"""A process of k holds about 1/k of what a worker of one holds, and a slice: counted in bytes."""

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco_worker import DiLoCoWorker
from kit.islands import Island
from kit.process_kit import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOOK_S = 0.002


class Peak:
    """The most bytes of tensors at a time, of those that were not there when it began."""

    def __init__(self) -> None:
        self._before = set(storages())
        self._ended = threading.Event()
        self.most = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def look(self) -> None:
        now = storages()
        self.most = max(self.most, sum(n for at, n in now.items() if at not in self._before))

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.look()

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.most


def storages() -> dict[int, int]:
    """Bytes by address, of all tensors on the host that anything refers to."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and type(each) in (Tensor, nn.Parameter):
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


def measure(kind: str, address: str, name: str, out: str, sizes: dict[str, Any]) -> None:
    """Train for some rounds, and write down the most that was kept, and the size of the model."""
    import torch.distributed as dist

    torch.manual_seed(0)
    width = sizes["width"]
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(sizes["layers"])))
    whole = sum(parameter.numel() for parameter in model.parameters()) * 4
    dist.init_process_group("gloo")
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    peak = Peak()
    with DiLoCoWorker(
        model, optimizer, server=address, worker_id=name, process_group="world"
    ) as diloco:
        for _ in range(sizes["steps"]):
            optimizer.step()
    most = peak.end()
    told = {"most": most, "whole": whole, "rounds": diloco.sync_count}
    torch.save(told, out)


# Base 1, delta in bf16 1/2, the version that arrives 1; and some for chunks at the ends.
OF_FP32 = 2.6
# What is on its way within the worker, what travels to and from the broker, and what is worked on.
SLICES = 16 << 20


@pytest.mark.parametrize(("kind", "count"), [("ddp", 2), ("fsdp", 4)])
def test_process_of_k_keeps_its_part_of_the_vectors_and_a_slice(
    processes: Processes, tmp_path: Path, kind: str, count: int
) -> None:
    broker = processes.broker(
        wire_dtype="bf16", sync_every=2, save_dir=None, chunk_elements=524_288
    )
    sizes = {"width": 2048, "layers": 6, "steps": 6}
    island = Island(processes, tmp_path, kind, count, broker.address(), "a", measure, **sizes)
    island.ends_well()
    for told in island.results():
        assert told["rounds"] == 3
        most = OF_FP32 / count * told["whole"] + SLICES
        assert told["most"] <= most, f"{told['most'] / told['whole']:.2f} of the fp32 parameters"
        assert told["most"] >= told["whole"] / count, "nothing was counted"
