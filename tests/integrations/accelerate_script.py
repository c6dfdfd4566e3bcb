"""A plain loop with Hugging Face Accelerate: `python accelerate_script.py NAME`."""

import sys
from pathlib import Path

from accelerate import Accelerator
from torch.utils.data import DataLoader

from diloco_worker import DiLoCoWorker
from kit import tiny_task

name = sys.argv[1]
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = tiny_task.TinyModel()
optimizer = tiny_task.optimizer_of(model)
# Half a batch each: two of them are one step.
loader = DataLoader(tiny_task.Examples(name), batch_size=tiny_task.BATCH // 2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
diloco = DiLoCoWorker(accelerator.unwrap_model(model), optimizer, worker_id=name)
accelerator.register_for_checkpointing(diloco)
folder, done = Path(f"{name}-checkpoint"), 0
for saved in sorted(Path().glob(f"{folder}-*"), key=lambda path: int(path.name.split("-")[-1])):
    done = int(saved.name.split("-")[-1])
if done:
    accelerator.load_state(f"{folder}-{done}")
with diloco:
    print(f"begins at {done}", flush=True)
    for batch in accelerator.skip_first_batches(loader, 2 * done):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), tiny_task.MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
            assert diloco.local_step == done
            if done % tiny_task.SAVE_EVERY == 0:
                accelerator.save_state(f"{folder}-{done}")
            tiny_task.die_if_asked(done)
tiny_task.write_result(name, accelerator.unwrap_model(model))
