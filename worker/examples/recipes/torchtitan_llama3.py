"""torchtitan: its Trainer with the hook over its model parts and optimizers.

pip install . torchtitan                                # in the folder of this project
DILOCO_SERVER=tcp://127.0.0.1:8512 torchrun --nproc-per-node 8 torchtitan_llama3.py
"""

import argparse
from types import SimpleNamespace

import torch
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from diloco_worker import DiLoCoWorker

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()


class DiLoCoTrainer(Trainer):
    def train(self):
        parts, optimizers = self.model_parts, list(self.optimizers)
        with DiLoCoWorker(parts, optimizers, process_group="world") as self.diloco:
            super().train()

    def should_continue_training(self):
        return super().should_continue_training() and not self.diloco.should_stop


class Counting:
    """Consecutive numbers instead of a data set and its tokenizer; each worker draws its own."""

    def __iter__(self):
        dice = torch.Generator().manual_seed(trainer.diloco.shard[0])
        while True:
            numbers = (torch.randint(64, (4, 1), generator=dice) + torch.arange(17)) % 64
            places = torch.arange(16).expand(4, 16)
            yield {"input": numbers[:, :-1], "positions": places}, numbers[:, 1:].contiguous()


config = llama3_debugmodel()  # yours: llama3_8b(), or what ConfigManager().parse_args() returns
config.loss = CrossEntropyLoss.Config()
config.tokenizer = SimpleNamespace(build=lambda **_: None)
config.dataloader = SimpleNamespace(build=lambda **_: Counting())
config.validator.enable = config.checkpoint.enable = False
config.model_spec.model.layers = config.model_spec.model.layers[:2]
config.training.steps, config.training.seq_len = options.steps, 16
config.training.local_batch_size, config.training.disable_cuda_graphs = 4, True
init_logger()
trainer = DiLoCoTrainer(config)
trainer.train()
trainer.close()
(model,) = trainer.model_parts
torch.distributed.destroy_process_group()
