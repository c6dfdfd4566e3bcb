"""Hugging Face's Trainer with the callback: `python trainer_script.py NAME`, also under torchrun."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from diloco_worker.transformers import DiLoCoCallback
from kit import tiny_task


class InOrder(Trainer):
    """Takes the examples in their order, as the plain loop does."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class Dies(TrainerCallback):
    def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        tiny_task.die_if_asked(state.global_step)


def main() -> None:
    name = sys.argv[1]
    model = tiny_task.TinyModel()
    trainer = InOrder(
        model,
        TrainingArguments(
            output_dir=f"{name}-checkpoints",
            per_device_train_batch_size=tiny_task.BATCH,
            max_steps=tiny_task.STEPS,
            save_steps=tiny_task.SAVE_EVERY,
            max_grad_norm=tiny_task.MAX_NORM,
            logging_steps=1,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=tiny_task.Examples(name),
        optimizers=(
            optimizer := tiny_task.optimizer_of(model),
            torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        ),
        callbacks=[DiLoCoCallback(worker_id=name), Dies()],
    )
    Path(f"{name}-checkpoints").mkdir(exist_ok=True)  # the first of several processes makes it late
    last = get_last_checkpoint(f"{name}-checkpoints")
    trainer.train(resume_from_checkpoint=last)
    print(trainer.state.log_history[-2:], flush=True)
    tiny_task.write_result(name + os.environ.get("RANK", ""), model)


if __name__ == "__main__":
    main()
