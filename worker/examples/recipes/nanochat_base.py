"""nanochat's GPT with its own MuonAdamW, from a clone of its repository.

PYTHONPATH=nanochat diloco-launch local -n 2 --sync-every 10 -- nanochat_base.py    # the clone
"""

import argparse

import torch
from nanochat.gpt import GPT, GPTConfig

from diloco_worker import DiLoCoWorker

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
sizes = {"n_layer": 2, "n_head": 2, "n_kv_head": 2, "n_embd": 64, "window_pattern": "L"}
torch.manual_seed(0)
with torch.device("meta"):
    model = GPT(GPTConfig(sequence_len=16, vocab_size=64, **sizes))
model.to_empty(device=device)
model.init_weights()
optimizer = model.setup_optimizer()  # one optimizer with groups for Muon and for AdamW
with DiLoCoWorker(model, optimizer) as diloco:
    dice = torch.Generator().manual_seed(diloco.shard[0])
    for step in range(options.steps):
        first = torch.randint(64, (8, 1), generator=dice)
        numbers = ((first + torch.arange(17)) % 64).to(device)  # counting
        loss = model(numbers[:, :-1], numbers[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        diloco.report(loss=loss, tokens=8 * 16)
        if step % 10 == 0:
            print(f"step {step}, loss {loss.item():.3f}", flush=True)
        if diloco.should_stop:
            break
print(f"done with a loss of {loss.item():.3f}")
