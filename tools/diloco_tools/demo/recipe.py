"""The inner training of the demo: optimizer and learning rate schedule, the same for everybody.

The single worker and every DiLoCo worker are trained by this one recipe, so that the only difference
between them is the synchronisation (and the learning rate, which is tuned for each of the two).
"""

import math
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

Schedule = Literal["cosine", "constant"]
WARMUP = 50  # steps of linear warm-up: Adam's first estimates are noisy
FINAL_FRACTION = 0.1  # of the peak learning rate, at the end of the cosine
LARGEST_GRADIENT = 1.0  # gradients of a larger norm are scaled down: small batches have outliers


@dataclass(frozen=True)
class Recipe:
    """How each worker trains: number of steps, batch, context, peak learning rate, schedule."""

    steps: int
    batch: int
    context: int
    lr: float
    schedule: Schedule


def learning_rate_factor(recipe: Recipe, step: int) -> float:
    """The learning rate of step number `step` (from 0) as a fraction of the peak."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    if recipe.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - WARMUP) / max(1, recipe.steps - WARMUP))
    return FINAL_FRACTION + (1 - FINAL_FRACTION) * (1 + math.cos(math.pi * progress)) / 2


def build_optimizer(model: nn.Module, recipe: Recipe) -> AdamW:
    """AdamW as it is usually set for small language models with small batches."""
    return AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.99), weight_decay=0.1)


def build_schedule(optimizer: Optimizer, recipe: Recipe) -> LambdaLR:
    """Warm-up, then cosine decay to 10% of the peak, or constant; call `.step()` after each step."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(recipe, step))
