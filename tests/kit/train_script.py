"""A user's training script: trains a small model and writes what came of it as JSON.

python train_script.py STEPS OUT [SECONDS_A_STEP]
"""

import json
import sys
import threading

import torch
from torch import nn

from diloco_worker import DiLoCoWorker

steps, out = int(sys.argv[1]), sys.argv[2]
pause = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
done = 0
with DiLoCoWorker(model, optimizer) as diloco:
    for _ in range(steps):
        x = torch.randn(16, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        diloco.report(loss=loss, tokens=16)
        done += 1
        print(f"step {done}", flush=True)
        if pause:
            threading.Event().wait(pause)  # stands for a slower machine
        if diloco.should_stop:
            print(f"stops: {diloco.stop_reason}", flush=True)
            break
result = {
    "steps": done,
    "weights": [p.detach().double().sum().item() for p in model.parameters()],
    "metrics": {key: str(value) for key, value in dict(diloco.sync_metrics).items()},
}
with open(out, "w") as file:
    json.dump(result, file)
