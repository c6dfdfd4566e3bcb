"""A training script that an engine places: alone, or as one of several processes that torchrun starts.

    python engine_script.py FOLDER [SECONDS_A_STEP]

It trains until the run is over. Where it is asked to end before, it saves, and its next incarnation goes
on from there. FOLDER gets the audit log and the pid of each incarnation, and in the end a result of each
worker.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from diloco_worker import RUN_IS_OVER, DiLoCoWorker, WorkerOptions

NOISE = 0.5  # of the labels: no model comes below its square
folder, pause = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
name = os.environ["DILOCO_WORKER_ID"]
rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

torch.set_num_threads(1)
torch.manual_seed(0)
teacher = nn.Linear(8, 1).requires_grad_(False)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
trained: nn.Module = model
if count > 1:
    dist.init_process_group("gloo")
    trained = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def batch(size: int, dice: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 8, generator=dice)
    return x, teacher(x) + NOISE * torch.randn(size, 1, generator=dice)


diloco = DiLoCoWorker(
    model,
    optimizer,
    process_group="world" if count > 1 else None,
    options=WorkerOptions(audit=folder / f"{name}.{time.time_ns()}.worker.jsonl"),
)
saved = folder / f"{name}.{rank}.pt"
done = 0
if saved.exists():
    state = torch.load(saved, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    diloco.load_state_dict(state["diloco"])
    done = state["done"]
print(f"begins at step {done}", flush=True)
with diloco:
    (folder / f"{name}.{rank}.pid").write_text(str(os.getpid()))
    dice = torch.Generator().manual_seed(1000 * diloco.shard[0] + 100 * rank + done)
    while not diloco.should_stop:
        x, y = batch(32, dice)
        loss = (trained(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        diloco.report(loss=loss, samples=32)
        done += 1
        if pause:
            threading.Event().wait(pause)  # stands for a larger model
    print(f"stops at step {done}: {diloco.stop_reason}", flush=True)
    is_over = diloco.run_is_over
    if not is_over:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
        torch.save({**state, "diloco": diloco.state_dict()}, saved.with_suffix(".new"))
        saved.with_suffix(".new").replace(saved)
if is_over and rank == 0:
    with torch.no_grad():
        x, y = batch(20_000, torch.Generator().manual_seed(7))
        result = {"loss": (model(x) - y).square().mean().item(), "steps": done}
    (folder / f"{name}.json").write_text(json.dumps(result))
if count > 1:
    dist.destroy_process_group()
sys.exit(RUN_IS_OVER if is_over else 0)
