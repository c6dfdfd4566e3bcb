"""LoRA: the base model is frozen, so workers that have it exchange the adapters alone.

pip install '.[transformers]' peft                      # in the folder of this project
diloco-broker serve --workers 2 --sync-every 20
DILOCO_SERVER=tcp://127.0.0.1:8512 DILOCO_WORKER_ID=a python lora.py    # in another, b
diloco-broker export --to adapters-of-the-run --like adapters-WORKER
"""

import argparse
import os

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from diloco_worker import DiLoCoWorker

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--out", default=f"adapters-{os.environ.get('DILOCO_WORKER_ID', 'alone')}")
options = parser.parse_args()

torch.manual_seed(0)  # the same base everywhere; yours comes from from_pretrained
base = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
)
model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"]))
trained = [each for each in model.parameters() if each.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
print(f"{sum(map(torch.numel, trained)):,} of {model.num_parameters():,} parameters are trained")
with DiLoCoWorker(model, optimizer) as diloco:
    dice = torch.Generator().manual_seed(diloco.shard[0])
    for step in range(options.steps):
        first = torch.randint(64, (8, 1), generator=dice)
        numbers = (first + torch.arange(16)) % 64  # counting
        loss = model(input_ids=numbers, labels=numbers).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        diloco.report(loss=loss, tokens=numbers.numel())
        if step % 10 == 0:
            print(f"step {step}, loss {loss.item():.3f}", flush=True)
        if diloco.should_stop:
            break
metrics = diloco.sync_metrics
model.save_pretrained(options.out)
print(f"done with a loss of {loss.item():.3f}; {metrics.bytes_down:,} bytes came from the broker")
