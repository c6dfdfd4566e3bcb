"""The task of `kit.tiny_task` in a plain loop that knows nothing of DiLoCo; else as `kit.plain_script`.

python unmodified_script.py NAME
"""

import sys

import torch
from torch.utils.data import DataLoader

from kit import tiny_task

name = sys.argv[1]
model = tiny_task.TinyModel()
optimizer = tiny_task.optimizer_of(model)
for batch in DataLoader(tiny_task.Examples(name), batch_size=tiny_task.BATCH):
    loss = model(**batch)["loss"]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), tiny_task.MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
tiny_task.write_result(name, model)
