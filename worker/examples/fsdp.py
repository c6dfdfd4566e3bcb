"""Several processes are one worker: FSDP2, and a checkpoint that another number of them goes on from.

diloco-broker serve --workers 2 --sync-every 20
DILOCO_SERVER=tcp://10.0.0.1:8512 torchrun --nproc-per-node 2 fsdp.py
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions as Options
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from diloco_worker import DiLoCoWorker

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--save-every", type=int, default=50)
own = f"last-{os.environ.get('DILOCO_WORKER_ID', 'alone')}"  # a folder for each worker
parser.add_argument("--checkpoint", type=Path, default=Path(own))
options = parser.parse_args()

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
torch.manual_seed(0)
target = nn.Linear(16, 4).requires_grad_(False)
model, done = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)), 0
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
diloco = DiLoCoWorker(model, optimizer, process_group="world")
whole = Options(full_state_dict=True, cpu_offload=True)
if options.checkpoint.exists():
    saved = torch.load(options.checkpoint / "model.pt", weights_only=True)
    parts = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
    set_state_dict(model, optimizer, **parts, options=whole)
    done = saved["done"]
    states = sorted(options.checkpoint.glob("diloco-*.pt"))  # one of each process that saved it
    diloco.load_state_dict([torch.load(state, weights_only=True) for state in states])
print(f"process {rank} of {dist.get_world_size()} begins at step {done}", flush=True)


def save() -> None:
    aside = options.checkpoint.with_suffix(f".{done}")
    aside.mkdir(exist_ok=True)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=whole)
    torch.save(diloco.state_dict(), aside / f"diloco-{rank}.pt")
    if rank == 0:
        torch.save({"model": of_model, "optimizer": of_optimizer, "done": done}, aside / "model.pt")
    dist.barrier()
    if rank == 0:  # the newest is the one that the link leads to
        link = options.checkpoint.with_suffix(".new")
        link.symlink_to(aside.name)
        link.replace(options.checkpoint)


with diloco:
    dice = torch.Generator().manual_seed(1_000_000 * diloco.shard[0] + 1000 * rank + done)
    while done < options.steps and not diloco.should_stop:
        x = torch.randn(32, 16, generator=dice)
        loss = (model(x) - target(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        diloco.report(loss=loss, samples=32)
        done += 1
        if rank == 0 and done % 10 == 0:
            print(f"step {done}, loss {loss.item():.3f}", flush=True)
        if done % options.save_every == 0:
            save()
print(f"done with a loss of {loss.item():.3f} after {diloco.sync_metrics.pushes} pushes")
