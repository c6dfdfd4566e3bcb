"""Mixed precision and torch.compile: a scaler's skipped steps do not count, the compiled model is ours.

diloco-broker serve --workers 2 --sync-every 20
DILOCO_SERVER=tcp://127.0.0.1:8512 python amp_compile.py    # --no-compile without a compiler
"""

import argparse

import torch
from torch import nn

from diloco_worker import DiLoCoWorker

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--no-compile", action="store_true")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
half = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
target = nn.Linear(32, 8).to(device).requires_grad_(False)

model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 8)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(device, enabled=half is torch.float16)
# The hook is given the model itself: the compiled one shares its parameters.
compiled = model if options.no_compile else torch.compile(model)
with DiLoCoWorker(model, optimizer) as diloco:
    dice = torch.Generator().manual_seed(diloco.shard[0])
    for step in range(options.steps):
        x = torch.randn(64, 32, generator=dice).to(device)
        with torch.autocast(device, half):
            loss = (compiled(x) - target(x)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        diloco.report(loss=loss, samples=64)
        if step % 10 == 0:
            print(f"step {step}, loss {loss.item():.3f}", flush=True)
        if diloco.should_stop:
            break
print(f"done with a loss of {loss.item():.3f} after {diloco.sync_metrics.pushes} pushes")
