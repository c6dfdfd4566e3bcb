"""LLaMA-Factory: one callback of `run_exp`, with the arguments of its YAML files.

pip install '.[transformers]' llamafactory              # in the folder of this project
diloco-launch local -n 2 --sync-every 10 -- llamafactory_sft.py
"""

import argparse
import json
import os
from pathlib import Path

import torch
from llamafactory.train.tuner import run_exp
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from diloco_worker.transformers import DiLoCoCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()
folder = Path(f"llamafactory-{os.environ.get('DILOCO_WORKER_ID', 'alone')}")

# A small model and data that learn to count; yours are the name of a model and of a data set.
words = ["<pad>", "<bos>", "<eos>", "<unk>", *map(str, range(60))]
tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
special = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "base")
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": len(words)}
LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=2, **sizes)).save_pretrained(
    folder / "base"
)
texts = [{"text": " ".join(str((n + k) % 60) for k in range(14))} for n in range(60)]
(folder / "counting.json").write_text(json.dumps(texts))
columns = {"file_name": "counting.json", "columns": {"prompt": "text"}}
(folder / "dataset_info.json").write_text(json.dumps({"counting": columns}))

arguments = {
    "model_name_or_path": str(folder / "base"),
    "stage": "pt",
    "do_train": True,
    "finetuning_type": "full",
    "dataset": "counting",
    "dataset_dir": str(folder),
    "output_dir": str(folder / "out"),
    "cutoff_len": 16,
    "max_steps": options.steps,
    "per_device_train_batch_size": 4,
    "learning_rate": 3e-3,
    "logging_steps": 10,
    "report_to": "none",
}
run_exp(arguments, callbacks=[DiLoCoCallback()])
model = LlamaForCausalLM.from_pretrained(folder / "out")
