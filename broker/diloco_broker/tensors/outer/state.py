"""What an outer optimizer remembers of one chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

State = Mapping[str, Tensor]
"""By name; a name is missing before its first use. The tensors never change."""

New = Callable[[Tensor], Tensor]
"""Returns an uninitialised tensor like the one given."""

MOMENTUM = "momentum"  # m
DELAYED = "delayed"  # D, the sum of the gradients in the buffer


def added(state: State, gradient: Tensor, new: New = torch.empty_like) -> Tensor:
    """The buffer's sum with one more gradient, in a new tensor."""
    total = state.get(DELAYED)
    if total is None:
        return new(gradient).copy_(gradient)
    return torch.add(total, gradient, out=new(gradient))


def without_buffer(state: State) -> State:
    """The same without the gradients in the buffer."""
    return {name: tensor for name, tensor in state.items() if name != DELAYED}


@dataclass(frozen=True)
class Rate:
    """Elements [start, stop) of a chunk that have the same learning rate and momentum."""

    start: int
    stop: int
    lr: float
    momentum: float = 0.0
