"""How the model is cut: chunks as they travel, or pieces of many chunks where it has too many.

The core and the sessions are told of a small model with as many chunks as there are pieces, and what is
sent of it has a size of its own for the lines. So they decide the same, with fewer events. The clock
that they are shown runs slower by as much as a piece is larger than a chunk: what they take for a
connection that stands still is then as many chunks late as in a real run.

A piece can be handed on only when it is whole, as a chunk, so a larger one makes a round longer by
about one piece of the quicker way. `simulation` simulates twice, with so many pieces and half as many,
and takes off what that makes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from diloco_broker.pure import Coded
from diloco_protocol.chunks import CHUNK_ELEMENTS
from diloco_protocol.dtypes import SIZES
from diloco_protocol.manifest import Kind, Manifest, TensorEntry

# Elements of a chunk of the small model: a block of every codec fits.
SMALL = 4096


@dataclass(frozen=True, eq=False)
class Payload:
    """Something that travels. `nbytes` is what the core is told, `size` what the line has to carry."""

    nbytes: int
    size: float
    elements: float


@dataclass(frozen=True, eq=False)
class Code(Payload):
    """A chunk as a difference; of several versions, one behind the other."""


@dataclass(frozen=True, eq=False)
class CodedChunk(Coded):
    """A finished chunk where replies are in few bits."""

    def joined(self, codes: Sequence[Any]) -> Code:
        total = sum(each.nbytes for each in codes)
        return Code(total, sum(each.size for each in codes), codes[0].elements)


@dataclass(frozen=True)
class Pieces:
    """A model of `parameters` elements in so many fragments, each cut into `count` pieces."""

    parameters: int
    fragments: int
    count: int

    @cached_property
    def elements(self) -> float:
        """Of a piece."""
        return self.parameters / self.fragments / self.count

    @cached_property
    def chunks(self) -> float:
        """That a piece stands for, at least one."""
        return max(1.0, self.elements / CHUNK_ELEMENTS)

    @property
    def manifest(self) -> Manifest:
        """The small model: a layer for each fragment."""
        size = (self.count * SMALL,)
        return Manifest(
            tuple(
                TensorEntry(f"layers.{number}.weight", size, "float32", Kind.TRAINABLE)
                for number in range(self.fragments)
            )
        )

    def payload(self, dtype: str) -> Payload:
        """One chunk of the small model, which is one piece of the large one."""
        return Payload(
            SIZES[dtype].most(SMALL), self.elements * SIZES[dtype].element, self.elements
        )

    def code(self, dtype: str) -> Code:
        """The same as a difference from the version before."""
        size = SIZES[dtype]
        return Code(round(SMALL * size.element), self.elements * size.element, self.elements)


def chunks_of(parameters: int, fragments: int) -> int:
    """Chunks of a fragment as they travel."""
    return max(1, math.ceil(parameters / fragments / CHUNK_ELEMENTS))
