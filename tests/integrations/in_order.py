"""Hugging Face's Trainer as the plain loop trains: examples in their order, at one constant rate."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from kit import tiny_task


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class Dies(TrainerCallback):
    def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        tiny_task.die_if_asked(state.global_step)


def train_in_order(
    name: str, model: Any, data: Dataset[Any], optimizer: torch.optim.Optimizer, callback: Any
) -> Any:
    """Go on from the last checkpoint of this name, if there is one. Returns the Trainer."""
    folder = Path(f"{name}-checkpoints")
    folder.mkdir(exist_ok=True)  # the first of several processes makes it late
    trainer = InOrder(
        model,
        TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=tiny_task.BATCH,
            max_steps=tiny_task.STEPS,
            save_steps=tiny_task.SAVE_EVERY,
            max_grad_norm=tiny_task.MAX_NORM,
            logging_steps=1,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=data,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        callbacks=[callback, Dies()],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    return trainer
