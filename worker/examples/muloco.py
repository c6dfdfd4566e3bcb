"""MuLoCo: Muon for the matrices, AdamW for the rest, and one count of both (arXiv 2505.23725).

DILOCO_SERVER=local python muloco.py    # one worker, with the outer optimizer in this process

Several workers, each of them with as few bytes as DiLoCo:

diloco-broker serve --workers 2 --sync-every 30 --outer-lr 0.7 --outer-momentum 0.6
DILOCO_SERVER=tcp://127.0.0.1:8512 python muloco.py    # in two terminals
"""

import argparse

import torch
from torch import nn

from diloco_worker import DiLoCoWorker

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
options = parser.parse_args()

torch.manual_seed(0)
target = nn.Linear(32, 8).requires_grad_(False)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
# The hidden matrices; the first and the last layer, and everything that is not a matrix, to AdamW.
hidden = [model[2].weight]
others = [each for each in model.parameters() if all(each is not matrix for matrix in hidden)]
muon = torch.optim.Muon(hidden, lr=3e-3, adjust_lr_fn="match_rms_adamw")
adamw = torch.optim.AdamW(others, lr=3e-3)
# A step counts when the last of the list has stepped, after all the others. With DILOCO_SERVER=local
# these are the outer settings of MuLoCo with one worker; a broker has its own.
local = {"local": {"outer_lr": 0.7, "outer_momentum": 0.5}}
with DiLoCoWorker(model, [muon, adamw], options=local) as diloco:
    dice = torch.Generator().manual_seed(diloco.shard[0])
    for step in range(options.steps):
        x = torch.randn(64, 32, generator=dice)
        loss = (model(x) - target(x)).square().mean()
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        diloco.report(loss=loss, samples=64)
        if step % 10 == 0:
            print(f"step {step}, loss {loss.item():.3f}", flush=True)
        if diloco.should_stop:
            break
print(f"done with a loss of {loss.item():.3f} after {diloco.sync_metrics.pushes} pushes")
