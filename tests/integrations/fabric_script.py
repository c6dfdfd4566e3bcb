"""A plain loop with Lightning's Fabric: `python fabric_script.py NAME [STRATEGY]`."""

import sys
from pathlib import Path

from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from diloco_worker import DiLoCoWorker
from kit import tiny_task

name, *strategy = sys.argv[1:]
fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy[0] if strategy else "auto")
fabric.launch()
model = tiny_task.TinyModel()
model, optimizer = fabric.setup(model, tiny_task.optimizer_of(model))
loader = fabric.setup_dataloaders(DataLoader(tiny_task.Examples(name), batch_size=tiny_task.BATCH))
diloco = DiLoCoWorker(model, optimizer, worker_id=name)
checkpoint, done = Path(f"{name}-checkpoint.ckpt"), 0
if checkpoint.exists():
    parts = {"model": model, "optimizer": optimizer}
    rest = fabric.load(checkpoint, parts, weights_only=True)
    diloco.load_state_dict(rest["diloco"])
    done = rest["done"]
with diloco:
    print(f"begins at {done}", flush=True)
    for batch in list(loader)[done:]:
        fabric.backward(model(**batch)["loss"])
        fabric.clip_gradients(model, optimizer, max_norm=tiny_task.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        assert diloco.local_step == done
        if done % tiny_task.SAVE_EVERY == 0:
            parts = {"model": model, "optimizer": optimizer}
            fabric.save(checkpoint, {**parts, "diloco": diloco.state_dict(), "done": done})
        tiny_task.die_if_asked(done)
tiny_task.write_result(name, model)
