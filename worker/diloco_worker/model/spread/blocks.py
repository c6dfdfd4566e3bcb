"""The part of a tensor that a process has: a rectangle of it, its block.

The elements of a rectangle keep their row-major order, so those in a range of the whole tensor's flat
elements are a range of the block's own flat elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from diloco_protocol import UsageError


@dataclass(frozen=True)
class Block:
    """The elements [offset, offset + size) of a tensor of this shape, in each dimension."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Block:
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @cached_property
    def elements(self) -> int:
        return math.prod(self.size)

    @cached_property
    def is_one_run(self) -> bool:
        """Whether its elements are contiguous in the whole tensor."""
        at = next((d for d, size in enumerate(self.size) if size != 1), len(self.size))
        return self.size[at + 1 :] == self.shape[at + 1 :]

    @cached_property
    def first(self) -> int:
        """The flat index of its first element in the whole tensor."""
        return sum(o * s for o, s in zip(self.offset, _strides(self.shape), strict=True))

    def before(self, index: int) -> int:
        """How many of its elements lie before this flat index of the whole tensor."""
        if not self.elements:
            return 0
        count, left = 0, index
        inner = self.elements
        for offset, size, stride in zip(self.offset, self.size, _strides(self.shape), strict=True):
            inner //= size
            at, left = divmod(left, stride)
            if at < offset:
                return count
            if at >= offset + size:
                return count + size * inner
            count += (at - offset) * inner
        return count + (left > 0 if not self.shape else 0)

    def indices(self, start: int, stop: int, base: int) -> slice | Tensor:
        """Where its own flat elements [start, stop) are in the whole tensor, counted from `base`."""
        if self.is_one_run:
            at = self.first - base
            return slice(at + start, at + stop)
        found = torch.full((stop - start,), self.first - base)
        own = torch.unravel_index(torch.arange(start, stop), self.size)
        for coordinate, stride in zip(own, _strides(self.shape), strict=True):
            found += coordinate * stride
        return found

    def meets(self, other: Block) -> bool:
        """Whether they have an element in common."""
        return bool(self.elements and other.elements) and all(
            max(a, b) < min(a + m, b + n)
            for a, m, b, n in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )


def _strides(shape: Sequence[int]) -> list[int]:
    strides, inner = [], 1
    for size in reversed(shape):
        strides.append(max(1, inner))
        inner *= size
    return strides[::-1]


def is_spread(tensor: object) -> bool:
    """Whether it is a DTensor. By its name, so that a worker of one process need not import them."""
    return any(
        base.__name__ == "DTensor" and base.__module__.startswith("torch.distributed")
        for base in type(tensor).__mro__
    )


def local(tensor: Tensor) -> Tensor:
    """The values that this process has of a tensor; writing to them writes to the tensor."""
    if not is_spread(tensor):
        return tensor.detach()
    found: Any = tensor
    with torch.no_grad():
        mine = found.to_local()
    assert isinstance(mine, Tensor)
    return mine.detach()


def block_of(name: str, tensor: Tensor) -> Block:
    """This process's block of a tensor. Raises UsageError where its part is not a block."""
    if not is_spread(tensor):
        return Block.whole(tensor.shape)
    # It is imported already.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found: Any = tensor
    if any(each.is_partial() for each in found.placements):
        raise UsageError(
            f"{name} is a DTensor of partial sums ({found.placements}); only parts and copies of "
            "values can be exchanged."
        )
    shape = tuple(found.shape)
    size, offset = compute_local_shape_and_global_offset(shape, found.device_mesh, found.placements)
    mine = tuple(local(tensor).shape)
    if math.prod(mine) == 0:
        return Block(shape, (0,) * len(shape), (0,) * len(shape))
    if tuple(size) != mine:
        raise UsageError(
            f"{name} has values of shape {list(mine)} here, where its placements "
            f"({found.placements}) mean {list(size)}; such a tensor cannot be exchanged."
        )
    return Block(shape, tuple(offset), mine)
