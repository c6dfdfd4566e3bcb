"""A byte-level GPT, small enough to learn something in a minute on one CPU core, and its training.

Pre-norm blocks of causal self-attention and a GELU MLP (Radford et al. 2019, GPT-2), RMSNorm without
a gain, no biases, learned positions, the embedding tied to the output head. The vocabulary is bytes, so
it needs no tokenizer.

The single worker and every DiLoCo worker are trained by one `Recipe`: they differ only in
synchronisation (and in the learning rate, which is tuned for each of the two).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

VOCABULARY = 256  # bytes
Schedule = Literal["cosine", "constant"]
WARMUP = 50  # steps of linear warm-up: Adam's first estimates are noisy
FINAL_FRACTION = 0.1  # of the peak learning rate, at the end of the cosine
LARGEST_GRADIENT = 1.0  # gradients of a larger norm are scaled down: small batches have outliers


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; the defaults give 0.43M parameters."""

    context: int = 64
    width: int = 128
    layers: int = 2
    heads: int = 4

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} does not divide by {self.heads} heads; "
                "choose a width that is a multiple of the number of heads"
            )


class Block(nn.Module):
    """One transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(functional.rms_norm(x, (width,)))
        # (batch, time, 3 width) -> three times (batch, heads, time, width / heads)
        q, k, v = qkv.view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        hidden = functional.gelu(self.up(functional.rms_norm(x, (width,))))
        return x + torch.as_tensor(self.down(hidden))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out: (batch, time) -> (batch, time, 256)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)
        # Each block adds twice to the residual stream: scale these outputs so that its initial
        # magnitude does not depend on the depth (GPT-2).
        for block in self.blocks:
            assert isinstance(block, Block)
            for layer in (block.out, block.down):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(functional.rms_norm(x, x.shape[-1:]), self.embedding.weight)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats per byte; `tokens` and `targets` are (batch, time) integers."""
        return functional.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def build_model(seed: int, config: GPTConfig) -> GPT:
    """A freshly initialised model; the same seed gives the same parameters.

    >>> sum(p.numel() for p in build_model(0, GPTConfig()).parameters())
    434176
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(config)


@torch.no_grad()
def validation_loss(model: GPT, tokens: Tensor, targets: Tensor, batch: int = 64) -> float:
    """Mean loss in nats per byte over all windows of (windows, context) `tokens` and `targets`."""
    total = 0.0
    for start in range(0, len(tokens), batch):
        some = slice(start, start + batch)
        total += model.loss(tokens[some], targets[some]).item() * len(tokens[some])
    return total / len(tokens)


@dataclass(frozen=True)
class Recipe:
    """The training of each worker."""

    steps: int
    batch: int
    context: int
    lr: float  # at its peak
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
    """AdamW with the usual settings for small language models and small batches."""
    return AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.99), weight_decay=0.1)


def build_schedule(optimizer: Optimizer, recipe: Recipe) -> LambdaLR:
    """Warm-up, then cosine decay to 10% of the peak, or constant; call `.step()` after each step."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(recipe, step))


def inner_step(
    model: GPT, optimizers: Sequence[Optimizer], tokens: Tensor, targets: Tensor
) -> Tensor:
    """One step of all optimizers on one batch; its loss."""
    loss = model.loss(tokens, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
    for each in optimizers:
        each.step()
        each.zero_grad()
    return loss
