"""Counts the bytes of tensors that a worker keeps on the host besides its model."""

from __future__ import annotations

import gc
import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco_worker import DiLoCoWorker

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


def measure(kind: str, address: str, out: str, sizes: dict[str, Any]) -> None:
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
        model, optimizer, server=address, worker_id="measured", process_group="world"
    ) as diloco:
        for _ in range(sizes["steps"]):
            optimizer.step()
    most = peak.end()
    told = {"most": most, "whole": whole, "rounds": diloco.sync_count}
    Path(f"{out}.{os.environ['RANK']}").write_text(json.dumps(told))
