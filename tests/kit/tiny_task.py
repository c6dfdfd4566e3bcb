"""One small training task that every framework trains in its own words: model, data, optimizer.

Nothing in it is random but by a seed, so that two scripts of it come to the same bits.
"""

import os
import signal
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

# Optimizer steps of a script, the examples of each, and the steps between two checkpoints.
STEPS = 16
BATCH = 8
SAVE_EVERY = 5
LEARNING_RATE = 1e-2
MAX_NORM = 1.0  # gradients are clipped to it
# A variable with the step behind which a script kills itself.
DIES_AT = "DIES_AT"


class TinyModel(nn.Module):
    """What a Hugging Face model looks like from outside, in a hundred parameters."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


class Examples(Dataset[dict[str, Tensor]]):
    """The examples of a worker; what is to be learnt is the same for all of them."""

    def __init__(self, name: str, count: int = STEPS * BATCH) -> None:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        self.x = torch.randn(count, 8, generator=generator)
        self.labels = self.x.sum(1, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)


def die_if_asked(step: int) -> None:
    """Kill this process without warning, if this is the step for it."""
    if os.environ.get(DIES_AT) == str(step):
        os.kill(os.getpid(), signal.SIGKILL)


def write_result(name: str, model: nn.Module) -> None:
    torch.save(model.state_dict(), Path(f"{name}.pt"))
