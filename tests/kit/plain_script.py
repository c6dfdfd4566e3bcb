"""The task of `kit.tiny_task` in a plain loop with the hook: what a framework's script is compared with.

python plain_script.py NAME
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from diloco_worker import DiLoCoWorker
from kit import tiny_task

name = sys.argv[1]
model = tiny_task.TinyModel()
optimizer = tiny_task.optimizer_of(model)
diloco = DiLoCoWorker(model, optimizer, worker_id=name)
checkpoint, done = Path(f"{name}-checkpoint.pt"), 0
parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "diloco": diloco}
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True)
    for key, part in parts.items():
        part.load_state_dict(saved[key])
    done = saved["done"]
with diloco:
    print(f"begins at {done}", flush=True)
    batches = list(DataLoader(tiny_task.Examples(name), batch_size=tiny_task.BATCH))
    for batch in batches[done:]:
        loss = model(**batch)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), tiny_task.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done % tiny_task.SAVE_EVERY == 0:
            states = {key: part.state_dict() for key, part in parts.items()}
            torch.save({**states, "done": done}, checkpoint)
        tiny_task.die_if_asked(done)
tiny_task.write_result(name, model)
