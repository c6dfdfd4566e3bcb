"""A plain loop: two processes of this script train one model; without DILOCO_SERVER it trains alone.

diloco-launch local -n 2 -- plain_loop.py    # a broker and two workers, on this machine

The same by hand, for several machines:

diloco-broker serve --workers 2 --sync-every 50
DILOCO_SERVER=tcp://127.0.0.1:8512 python plain_loop.py    # in two terminals
"""

import argparse
import sys

import torch
from torch import nn

from diloco_worker import RUN_IS_OVER, DiLoCoWorker

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
steps = parser.parse_args().steps

torch.manual_seed(0)
angles = 3 * torch.rand(4096, 1)
points, labels = torch.cat([angles * angles.cos(), angles * angles.sin()], 1), (angles > 1.5)

model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with DiLoCoWorker(model, optimizer) as diloco:
    index, count = diloco.shard  # each worker learns from a part of the data
    mine, truth = points[index::count], labels[index::count].float()
    dice = torch.Generator().manual_seed(index)
    for step in range(steps):
        chosen = torch.randint(len(mine), (64,), generator=dice)
        loss = nn.functional.binary_cross_entropy_with_logits(model(mine[chosen]), truth[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        diloco.report(loss=loss, samples=64)
        if step % 10 == 0:
            print(f"step {step}, loss {loss.item():.3f}", flush=True)
        if diloco.should_stop:
            break
print(f"done with a loss of {loss.item():.3f} after {diloco.sync_metrics.pushes} pushes")
if diloco.run_is_over:
    sys.exit(RUN_IS_OVER)  # diloco-worker run does not start it again
