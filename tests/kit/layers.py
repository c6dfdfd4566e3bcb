"""A model of layers that are fragments, and pseudo-gradients for it."""

import torch
from torch import Tensor, nn

SIZE = 24  # of a layer: 576 parameters, 36 chunks


class Layers(nn.Module):
    """So many layers without biases: with as many fragments, layer i is fragment i."""

    def __init__(self, layers: int = 1, size: int = SIZE) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(layers))
        generator = torch.Generator().manual_seed(1)  # of its own: threads make models as well
        for weight in self.parameters():
            weight.data.copy_(torch.randn(size, size, generator=generator))


def name_of(fragment: int) -> str:
    return f"layers.{fragment}.weight"


def delta(worker: int, number: int) -> Tensor:
    """The pseudo-gradient of a worker's push 0, 1, ..."""
    generator = torch.Generator().manual_seed(1000 * worker + number)
    return torch.randn(SIZE, SIZE, generator=generator)
