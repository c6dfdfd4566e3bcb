"""A loop that may be killed at any moment: started again, it goes on where its checkpoint was.

diloco-broker serve --workers 2 --sync-every 20
diloco-worker run --restarts 10 -- python resume.py    # with DILOCO_SERVER, DILOCO_WORKER_ID set
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from torch import nn

from diloco_worker import RUN_IS_OVER, DiLoCoWorker

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--save-every", type=int, default=50)
own = f"last-{os.environ.get('DILOCO_WORKER_ID', 'alone')}.pt"  # a file for each worker
parser.add_argument("--checkpoint", type=Path, default=Path(own))
options = parser.parse_args()

torch.manual_seed(0)
target = nn.Linear(16, 4).requires_grad_(False)
model, done = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)), 0
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
diloco = DiLoCoWorker(model, optimizer)
parts = {"model": model, "optimizer": optimizer, "diloco": diloco}
if options.checkpoint.exists():
    saved = torch.load(options.checkpoint, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    done = saved["done"]
print(f"begins at step {done}", flush=True)


def save() -> None:
    states = {name: part.state_dict() for name, part in parts.items()}
    aside = options.checkpoint.with_suffix(".new")
    torch.save({**states, "done": done}, aside)
    os.replace(aside, options.checkpoint)  # whole or not at all


with diloco:
    # Its own numbers, and others each time that it goes on.
    dice = torch.Generator().manual_seed(1_000_000 * diloco.shard[0] + done)
    while done < options.steps and not diloco.should_stop:
        x = torch.randn(32, 16, generator=dice)
        loss = (model(x) - target(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        diloco.report(loss=loss, samples=32)
        done += 1
        if done % 10 == 0:
            print(f"step {done}, loss {loss.item():.3f}", flush=True)
        if done % options.save_every == 0:
            save()
    save()
print(f"done with a loss of {loss.item():.3f} after {diloco.sync_metrics.pushes} pushes")
if diloco.run_is_over:
    sys.exit(RUN_IS_OVER)  # diloco-worker run does not start it again
