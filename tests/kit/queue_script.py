"""A user's script that trains on units of the work queue, with a DataLoader of two processes.

python queue_script.py UNITS EPOCHS SECONDS_A_STEP

One parameter for each unit: each sample of a unit adds one to its own, so that the global parameters say
how often each unit is in them.
"""

import multiprocessing
import sys
import threading

import torch
from torch.utils.data import DataLoader

from diloco_worker import DiLoCoWorker
from diloco_worker.data import QueuedDataset, WorkQueue


def samples_of(unit: int) -> list[int]:
    return [unit]


units, epochs, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
# The tests' processes end with them; such may have no children of their own otherwise.
multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
torch.set_num_threads(1)
model = torch.nn.Embedding(units, 1)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
with DiLoCoWorker(model, optimizer) as diloco:
    queue = WorkQueue(diloco, "numbers", units, epochs=epochs)
    data = QueuedDataset(queue, samples_of)
    # As everywhere on Linux; the tests' processes have another default.
    loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
    for batch in queue.batches(loader):
        optimizer.zero_grad()
        (-model(batch).sum()).backward()
        optimizer.step()
        print(f"step {diloco.local_step} on {batch.tolist()}", flush=True)
        threading.Event().wait(pause)  # stands for a slower machine
    diloco.load_global()
print("counts", sorted({int(each) for each in model.weight.round().flatten()}), flush=True)
