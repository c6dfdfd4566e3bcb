"""Adapters of a small GPT-2 by PEFT, in the Trainer or a loop: `python lora_script.py NAME [plain]`."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from integrations.in_order import train_in_order
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from diloco_worker import DiLoCoWorker
from diloco_worker.transformers import DiLoCoCallback
from kit import tiny_task

LENGTH, VOCABULARY = 12, 500


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, name: str) -> None:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        shape = (tiny_task.STEPS * tiny_task.BATCH, LENGTH)
        self.tokens = torch.randint(VOCABULARY, shape, generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_model() -> Any:
    torch.manual_seed(0)
    sizes = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 128,
        "vocab_size": VOCABULARY,
        "n_positions": LENGTH,
    }
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **still, bos_token_id=0, eos_token_id=0))
    adapters = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    return get_peft_model(model, adapters)


def by_hand(name: str, model: Any, optimizer: torch.optim.Optimizer) -> DiLoCoWorker:
    with DiLoCoWorker(model, optimizer, worker_id=name) as diloco:
        for batch in DataLoader(Texts(name), batch_size=tiny_task.BATCH):
            count = batch["labels"].numel()  # as the Trainer counts beneath an adapter
            model(**batch, num_items_in_batch=torch.tensor(count)).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), tiny_task.MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return diloco


def by_trainer(name: str, model: Any, optimizer: torch.optim.Optimizer) -> DiLoCoWorker | None:
    callback = DiLoCoCallback(worker_id=name)
    train_in_order(name, model, Texts(name), optimizer, callback)
    return callback.diloco


name = sys.argv[1]
model = make_model()
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=tiny_task.LEARNING_RATE, weight_decay=0.0)
train = by_hand if "plain" in sys.argv else by_trainer
diloco = train(name, model, optimizer)
assert diloco is not None
metrics = diloco.sync_metrics
sizes = {
    "all": sum(4 * p.numel() for p in model.parameters()),
    "trained": sum(4 * p.numel() for p in trained),
    "moved": [metrics.bytes_up, metrics.bytes_down],
}
Path(f"{name}.json").write_text(json.dumps(sizes))
tiny_task.write_result(name, model)
