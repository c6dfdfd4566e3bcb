"""Lightning Fabric: the hook is given what `fabric.setup` returns.

pip install '.[lightning]'                              # in the folder of this project
diloco-launch local -n 2 --sync-every 10 -- fabric_loop.py
"""

import argparse

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from diloco_worker import DiLoCoWorker

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

fabric = Fabric(devices=1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
x = torch.randn(2048, 16)
with DiLoCoWorker(model, optimizer) as diloco:  # devices=8: process_group="world"
    index, count = diloco.shard  # each worker learns from a part of the data
    mine = x[index::count]
    data = TensorDataset(mine, mine.sum(1, keepdim=True).tanh())
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=32, shuffle=True))
    while diloco.local_step < options.steps and not diloco.should_stop:
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            diloco.report(loss=loss)
            if diloco.local_step % 10 == 0:
                print(f"step {diloco.local_step}, loss {loss.item():.3f}", flush=True)
            if diloco.local_step == options.steps or diloco.should_stop:
                break
print(f"done with a loss of {loss.item():.3f}")
