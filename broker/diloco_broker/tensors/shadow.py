"""Replies in few bits: a shadow of the master parameters that every worker holds bit for bit.

EF21-P (Gruntkowska et al. 2022, arXiv 2209.15218). x is the master, in fp32; w its shadow. Behind each
outer step c = C(x - w) is sent, and w <- w + D(c) here as at each worker. What c leaves out stays in
x - w, and goes with the next: so the shadow follows, and no copy drifts from another, since the product
of code and scale is exact in fp32 and the sum is rounded alike everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco_broker.core.state.versions.reply import Coded
from diloco_protocol.chunks import ChunkSpan, Segment
from diloco_protocol.dtypes import in_few_bits
from diloco_protocol.tensors.codecs import ENCODERS, as_bytes, checksum, is_finite
from diloco_protocol.tensors.tensor_pool import TensorPool

# What the shadow is called among what a checkpoint has of each chunk.
SHADOW = "shadow"


@dataclass(eq=False, repr=False)
class Shadows:
    """The shadow of each chunk of parameters, by fragment and index; none where replies are whole.

    `reply` is what parameters travel in on their way down. A shadow is never written to: a step makes
    a new one.
    """

    reply: str
    buffers: TensorPool

    def __post_init__(self) -> None:
        self._values: dict[tuple[int, int], Tensor] = {}

    def has(self, span: ChunkSpan) -> bool:
        """Whether a chunk travels as a difference from its shadow."""
        return in_few_bits(self.reply) and span.segment is Segment.PARAMETERS

    def begin(
        self, fragment: int, index: int, master: Tensor, shadow: Tensor | None = None
    ) -> None:
        """Workers hold these values, or those of the master itself."""
        self._values[fragment, index] = master if shadow is None else shadow

    def forget(self, fragment: int) -> None:
        for key in [key for key in self._values if key[0] == fragment]:
            del self._values[key]

    def of(self, fragment: int, index: int) -> Tensor | None:
        """What workers hold of a chunk; None where that is the master itself."""
        return self._values.get((fragment, index))

    def whole(self, fragment: int, index: int) -> Coded:
        """A chunk as it is sent to those who hold no version that it follows."""
        return _whole(self._values[fragment, index])

    @torch.no_grad()
    def follow(self, fragment: int, span: ChunkSpan, master: Tensor) -> Coded:
        """Let the shadow of a chunk follow its master, and return what is sent."""
        shadow = self._values[fragment, span.index]
        apart = torch.sub(master, shadow, out=self.buffers.like(shadow))
        if not is_finite(apart):
            return self._jump(fragment, span, master)
        encoded = ENCODERS[self.reply](apart)
        moved = torch.add(shadow, encoded.read(), out=apart)
        if not is_finite(moved):
            return self._jump(fragment, span, master)
        self._values[fragment, span.index] = moved
        return _whole(moved, encoded.payload)

    def _jump(self, fragment: int, span: ChunkSpan, master: Tensor) -> Coded:
        """Where no difference in fp32 leads from one to the other: the chunk goes whole."""
        self._values[fragment, span.index] = master
        return _whole(master)

    def kept(self, fragment: int, count: int) -> Mapping[str, list[Tensor | None]]:
        """For a checkpoint, by name; empty where there are none."""
        found = [self.of(fragment, index) for index in range(count)]
        return {SHADOW: found} if any(each is not None for each in found) else {}


def _whole(values: Tensor, code: Any = None) -> Coded:
    return Coded(as_bytes(values), code, checksum(values))
