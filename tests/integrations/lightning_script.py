"""Lightning's Trainer with the callback: `python lightning_script.py NAME`, also under torchrun."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from diloco_worker.lightning import DiLoCoCallback
from kit import tiny_task


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_task.TinyModel()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return self.model(**batch)["loss"]  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return tiny_task.optimizer_of(self.model)


class Batches:
    """Continues at the place of a checkpoint, as Lightning expects for resuming within an epoch."""

    def __init__(self, name: str) -> None:
        self.loader = DataLoader(tiny_task.Examples(name), batch_size=tiny_task.BATCH)
        self.given = self.begins = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number, batch in enumerate(self.loader):
            if number >= self.begins:
                self.given = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins = state["given"]


class Deadly(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        print(f"begins at {trainer.global_step}", flush=True)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        tiny_task.die_if_asked(trainer.global_step)


name = sys.argv[1]
folder = Path(f"{name}-checkpoint")
saved = sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[-1]))
processes = int(os.environ.get("WORLD_SIZE", "1"))
trainer = Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=processes,
    strategy="ddp" if processes > 1 else "auto",
    gradient_clip_val=tiny_task.MAX_NORM,
    logger=CSVLogger(".", name=f"{name}-log"),
    log_every_n_steps=1,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[
        Deadly(),
        DiLoCoCallback(worker_id=name),
        ModelCheckpoint(folder, "{step}", every_n_train_steps=tiny_task.SAVE_EVERY, save_top_k=-1),
    ],
)
module = Module()
trainer.fit(module, Batches(name), ckpt_path=saved[-1] if saved else None, weights_only=True)
tiny_task.write_result(name + os.environ.get("RANK", ""), module.model)
