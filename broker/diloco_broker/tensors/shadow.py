"""Replies in few bits: a shadow of the master parameters that every worker holds bit for bit.

EF21-P (Gruntkowska et al. 2022, arXiv 2209.15218). x is the master, in fp32; w its shadow. Behind each
outer step c = C(x - w) is sent, and w <- w + D(c) here as at each worker. What c leaves out stays in
x - w, and goes with the next: so the shadow follows, and no copy drifts from another, since the product
of code and scale is exact in fp32 and the sum is rounded alike everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco_broker.core.versions.reply import Coded
from diloco_broker.tensors.memory import empty, empty_like
from diloco_protocol.chunks import ChunkSpan, Segment
from diloco_protocol.dtypes import in_few_bits
from diloco_protocol.tensors.codecs import as_bytes, checksum, follow

# What the shadow is called among what a checkpoint has of each chunk.
SHADOW = "shadow"


@dataclass(eq=False, repr=False)
class Shadows:
    """The shadow of each chunk of parameters, by fragment and index; none where replies are whole.

    `reply` is what parameters travel in on their way down. A shadow is never written to: a step makes
    a new one.
    """

    reply: str

    def __post_init__(self) -> None:
        self._values: dict[tuple[int, int], Tensor] = {}

    def has(self, span: ChunkSpan) -> bool:
        """Whether a chunk travels as a difference from its shadow."""
        return in_few_bits(self.reply) and span.segment is Segment.PARAMETERS

    def put(self, fragment: int, index: int, shadow: Tensor) -> None:
        """Workers hold these values."""
        self._values[fragment, index] = shadow

    def forget(self, fragment: int) -> None:
        for key in [key for key in self._values if key[0] == fragment]:
            del self._values[key]

    def of(self, fragment: int, index: int) -> Tensor | None:
        """What workers hold of a chunk; None where that is the master itself."""
        return self._values.get((fragment, index))

    def whole(self, fragment: int, index: int) -> Coded:
        """A chunk as it is sent to those who hold no version that it follows."""
        return _whole(self._values[fragment, index])

    def kept(self, fragment: int, count: int) -> Mapping[str, list[Tensor | None]]:
        """For a checkpoint, by name; empty where there are none."""
        found = [self.of(fragment, index) for index in range(count)]
        return {SHADOW: found} if any(each is not None for each in found) else {}


@torch.no_grad()
def followed(reply: str, shadow: Tensor, master: Tensor) -> tuple[Tensor, Coded]:
    """The shadow of a chunk once it has followed its master, and what is sent.

    Where no difference in fp32 leads from one to the other, the chunk goes whole.
    """
    moved = empty_like(shadow)
    found = follow(reply, master, shadow, moved, lambda count: empty(count, torch.uint8))
    return (moved, Coded(as_bytes(moved), *found)) if found else (master, _whole(master))


def _whole(values: Tensor) -> Coded:
    return Coded(as_bytes(values), None, checksum(values))
