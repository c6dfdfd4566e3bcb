"""A byte-level GPT, small enough to learn something in a minute on one CPU core.

Pre-norm blocks of causal self-attention and a GELU MLP (Radford et al. 2019, GPT-2), RMSNorm without
a gain, no biases, learned positions, the embedding tied to the output head. Bytes are the vocabulary,
so there is no tokenizer and any text will do.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # bytes


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
        # Each block adds twice to the residual stream: scale those outputs so that its size at
        # the start does not depend on the depth (GPT-2).
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
    was_training = model.training
    model.eval()
    total = 0.0
    for start in range(0, len(tokens), batch):
        some = slice(start, start + batch)
        total += model.loss(tokens[some], targets[some]).item() * len(tokens[some])
    model.train(was_training)
    return total / len(tokens)
