"""Diffusers: an unconditional U-Net, trained as in the library's own scripts, with Accelerate.

pip install '.[transformers]' diffusers                 # in the folder of this project
diloco-launch local -n 2 --sync-every 10 -- diffusers_unet.py
"""

import argparse

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_constant_schedule_with_warmup
from torch import nn

from diloco_worker import DiLoCoWorker

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

accelerator = Accelerator()
torch.manual_seed(0)
model = UNet2DModel(
    sample_size=8,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(16, 32),
    down_block_types=("DownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
)
noises = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = get_constant_schedule_with_warmup(optimizer, 5)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
images = torch.linspace(-1, 1, 8).outer(torch.ones(8)).expand(256, 1, 8, 8)
with DiLoCoWorker(accelerator.unwrap_model(model), optimizer) as diloco:
    index, count = diloco.shard  # each worker learns from a part of the data, with noise of its own
    mine, dice = images[index::count], torch.Generator().manual_seed(index)
    for step in range(options.steps):
        batch = mine[torch.randint(len(mine), (16,), generator=dice)].to(accelerator.device)
        noise = torch.randn(batch.shape, generator=dice).to(batch.device)
        times = torch.randint(100, (len(batch),), generator=dice).to(batch.device)
        found = model(noises.add_noise(batch, noise, times), times).sample
        loss = nn.functional.mse_loss(found, noise)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        diloco.report(loss=loss, samples=len(batch))
        if step % 10 == 0:
            print(f"step {step}, loss {loss.item():.3f}", flush=True)
        if diloco.should_stop:
            break
print(f"done with a loss of {loss.item():.3f}")
