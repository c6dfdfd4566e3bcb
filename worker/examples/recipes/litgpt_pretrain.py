"""LitGPT: its GPT and its loss in a loop of Fabric, as in `litgpt pretrain`.

pip install . litgpt                                    # in the folder of this project
diloco-launch local -n 2 --sync-every 10 -- litgpt_pretrain.py
"""

import argparse

import torch
from lightning.fabric import Fabric
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy

from diloco_worker import DiLoCoWorker

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

fabric = Fabric(devices=1)
torch.manual_seed(0)
sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "padded_vocab_size": 64}
model = GPT(Config(**sizes))  # yours: Config.from_name("pythia-160m")
model.apply(model._init_weights)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
with DiLoCoWorker(model, optimizer) as diloco:  # devices=8: process_group="world"
    dice = torch.Generator().manual_seed(diloco.shard[0])
    for step in range(options.steps):
        first = torch.randint(64, (8, 1), generator=dice)
        numbers = fabric.to_device((first + torch.arange(17)) % 64)  # counting
        loss = chunked_cross_entropy(model(numbers[:, :-1]), numbers[:, 1:])
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        diloco.report(loss=loss, tokens=8 * 16)
        if step % 10 == 0:
            print(f"step {step}, loss {loss.item():.3f}", flush=True)
        if diloco.should_stop:
            break
print(f"done with a loss of {loss.item():.3f}")
