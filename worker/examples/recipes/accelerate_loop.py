"""Accelerate's own loop: the hook is given the unwrapped model and the prepared optimizer.

pip install '.[transformers]'                           # in the folder of this project
diloco-launch local -n 2 --sync-every 10 -- accelerate_loop.py
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from diloco_worker import DiLoCoWorker

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
x = torch.randn(2048, 16)
model, optimizer = accelerator.prepare(model, optimizer)
diloco = DiLoCoWorker(accelerator.unwrap_model(model), optimizer)
accelerator.register_for_checkpointing(diloco)  # save_state and load_state include it
with diloco:
    index, count = diloco.shard  # each worker learns from a part of the data
    mine = x[index::count]
    data = TensorDataset(mine, mine.sum(1, keepdim=True).tanh())
    loader = accelerator.prepare(DataLoader(data, batch_size=16, shuffle=True))
    while diloco.local_step < options.steps and not diloco.should_stop:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:  # an optimizer step, counted by the hook
                diloco.report(loss=loss)
                if diloco.local_step % 10 == 0:
                    print(f"step {diloco.local_step}, loss {loss.item():.3f}", flush=True)
                if diloco.local_step == options.steps or diloco.should_stop:
                    break
print(f"done with a loss of {loss.item():.3f}")
