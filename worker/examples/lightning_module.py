"""Lightning: one callback.

pip install '.[lightning]'                              # in the folder of this project
diloco-broker serve --workers 2 --sync-every 20
DILOCO_SERVER=tcp://127.0.0.1:8512 DILOCO_WORKER_ID=a python lightning_module.py    # in another, b
"""

import argparse

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from diloco_worker.lightning import DiLoCoCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        if number % 10 == 0:
            print(f"step {self.global_step}, loss {loss.item():.3f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


torch.manual_seed(0)
x = torch.randn(2048, 16)
data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
trainer = lightning.Trainer(
    max_steps=options.steps,
    max_epochs=-1,
    accelerator="auto",
    devices=1,
    callbacks=[DiLoCoCallback()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
# The callback shuffles the data in an order of this worker's own.
trainer.fit(Regression(), DataLoader(data, batch_size=32, shuffle=True))
print(f"done with a loss of {trainer.callback_metrics['loss'].item():.3f}")
