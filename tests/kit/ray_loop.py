"""A loop of Ray Train as a user writes one: it trains until the run is over, and reports."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train.torch import prepare_model
from torch import nn

from diloco_tools.ray import report
from diloco_worker import DiLoCoWorker, WorkerOptions

GO = "go"  # as soon as this file is there, no step is followed by a pause any more
NOISE = 0.5  # of the labels: no model comes below its square


def loop(config: dict[str, Any]) -> None:
    """Each incarnation writes its pid; the last one its loss."""
    folder = Path(config["folder"])
    name, rank = os.environ["DILOCO_WORKER_ID"], train.get_context().get_world_rank()
    torch.manual_seed(0)
    teacher = nn.Linear(8, 1).requires_grad_(False)
    model: nn.Module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    count = train.get_context().get_world_size()
    trained = prepare_model(model) if count > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def batch(size: int, dice: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(size, 8, generator=dice)
        return x, teacher(x) + NOISE * torch.randn(size, 1, generator=dice)

    options = WorkerOptions(audit=folder / f"{name}.{time.time_ns()}.worker.jsonl")
    group = "world" if count > 1 else None
    with DiLoCoWorker(model, optimizer, process_group=group, options=options) as diloco:
        (folder / f"{name}.{rank}.pid").write_text(str(os.getpid()))
        dice = torch.Generator().manual_seed(1000 * diloco.shard[0] + 100 * rank)
        steps = 0
        while not diloco.should_stop:
            x, y = batch(32, dice)
            loss = (trained(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            diloco.report(loss=loss, samples=32)
            steps += 1
            if not (folder / GO).exists():
                threading.Event().wait(config["pause"])  # stands for a larger model
    with torch.no_grad():
        x, y = batch(20_000, torch.Generator().manual_seed(7))
        end = (model(x) - y).square().mean().item()
    report(diloco, {"end": end, "steps": steps})
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps({"loss": end}))
