"""Hugging Face's Trainer with the callback: `python trainer_script.py NAME`, also under torchrun."""

import os
import sys

from integrations.in_order import train_in_order

from diloco_worker.transformers import DiLoCoCallback
from kit import tiny_task

name = sys.argv[1]
model = tiny_task.TinyModel()
optimizer, callback = tiny_task.optimizer_of(model), DiLoCoCallback(worker_id=name)
trainer = train_in_order(name, model, tiny_task.Examples(name), optimizer, callback)
print(trainer.state.log_history[-2:], flush=True)
tiny_task.write_result(name + os.environ.get("RANK", ""), model)
