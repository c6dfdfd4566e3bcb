"""Adapters of a small GPT-2 by PEFT, in Hugging Face's Trainer: `python lora_script.py NAME`."""

import sys
from typing import Any

import torch
from integrations.in_order import train_in_order
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

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
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 128}
    sizes |= {"vocab_size": VOCABULARY, "n_positions": LENGTH}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **still, bos_token_id=0, eos_token_id=0))
    adapters = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    return get_peft_model(model, adapters)


name = sys.argv[1]
model = make_model()
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=tiny_task.LEARNING_RATE, weight_decay=0.0)
train_in_order(name, model, Texts(name), optimizer, DiLoCoCallback(worker_id=name))
tiny_task.write_result(name, model)
