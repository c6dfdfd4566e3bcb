"""TRL's SFTTrainer: one callback. A small Llama learns to count; yours comes from its name.

pip install '.[transformers]' trl                       # in the folder of this project
diloco-launch local -n 2 --sync-every 10 -- trl_sft.py
"""

import argparse
import os

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from diloco_worker.transformers import DiLoCoCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

words = ["<pad>", "<eos>", *map(str, range(62))]
tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
)
texts = [" ".join(str((first + n) % 62) for n in range(15)) for first in range(62)]
# The callback shuffles the data in an order of this worker's own; better give it a part.
index = int(os.environ.get("DILOCO_SHARD_INDEX", "0"))
count = int(os.environ.get("DILOCO_NUM_SHARDS", "1"))
trainer = SFTTrainer(
    model,
    SFTConfig(
        f"sft-run-{os.environ.get('DILOCO_WORKER_ID', 'alone')}",
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=10,
        bf16=torch.cuda.is_available(),
        report_to=[],
    ),
    train_dataset=Dataset.from_dict({"text": texts}).shard(count, index),
    processing_class=PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ),
    callbacks=[DiLoCoCallback()],
)
found = trainer.train()
print(f"done with a loss of {found.training_loss:.3f} on average")
