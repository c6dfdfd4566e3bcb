"""Hugging Face's Trainer: one callback. A small GPT-2 learns to count.

pip install '.[transformers]'                           # in the folder of this project
diloco-broker serve --workers 2 --sync-every 20
DILOCO_SERVER=tcp://127.0.0.1:8512 DILOCO_WORKER_ID=a python hugging_face.py    # in another, b
"""

import argparse
import os

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from diloco_worker.transformers import DiLoCoCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument(
    "--out", default=f"hugging-face-run-{os.environ.get('DILOCO_WORKER_ID', 'alone')}"
)
options = parser.parse_args()


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sixteen numbers in order, from any on."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        numbers = (torch.arange(16) + index) % 64
        return {"input_ids": numbers, "labels": numbers}


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
arguments = TrainingArguments(
    options.out,
    max_steps=options.steps,
    per_device_train_batch_size=8,
    learning_rate=3e-3,
    logging_steps=10,
    save_steps=50,
    report_to=[],
)
# The callback shuffles the data in an order of this worker's own.
trainer = Trainer(model, arguments, train_dataset=Counting(), callbacks=[DiLoCoCallback()])
found = trainer.train()
print(f"done with a loss of {found.training_loss:.3f} on average")
