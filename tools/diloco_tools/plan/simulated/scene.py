"""The scene of a simulated run: the world, the question, and the model cut into pieces.

A model with few chunks is simulated chunk by chunk. For a larger one, core and sessions see a small
model with as many chunks as there are pieces, and each piece has its own size on the links: they make
the same decisions with fewer events. Their clock runs slower by the number of chunks in a piece, so
that their timeouts for a stalled connection are as many chunks long as in a real run.

A piece, like a chunk, is forwarded only when it is complete, so larger pieces lengthen a round by about
one piece of the faster direction. `run.simulate` extrapolates from two numbers of pieces to remove that.
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
from diloco_tools.plan.question import Question
from diloco_tools.plan.simulated.costs import GIGA, Costs
from diloco_tools.plan.simulated.fair_share import Hub, World

SMALL = 4096  # elements of a chunk of the small model: a block of every codec fits


@dataclass(frozen=True, eq=False)
class Payload:
    """A message body: `nbytes` for the core, `size` on the link."""

    nbytes: int
    size: float
    elements: float


@dataclass(frozen=True, eq=False)
class Code(Payload):
    """A chunk as a difference to an earlier version, or as several consecutive ones."""


@dataclass(frozen=True, eq=False)
class CodedChunk(Coded):
    """A finished chunk if replies are quantized."""

    def joined(self, codes: Sequence[Any]) -> Code:
        total = sum(each.nbytes for each in codes)
        return Code(total, sum(each.size for each in codes), codes[0].elements)


@dataclass(frozen=True)
class Pieces:
    """A model of `parameters` elements in `fragments`, each cut into `count` pieces."""

    parameters: int
    fragments: int
    count: int

    @cached_property
    def elements(self) -> float:
        """Of a piece."""
        return self.parameters / self.fragments / self.count

    @cached_property
    def chunks(self) -> float:
        """Chunks that a piece represents, at least one."""
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
        """A chunk of the small model, which is a piece of the large one."""
        return Payload(
            SIZES[dtype].most(SMALL), self.elements * SIZES[dtype].element, self.elements
        )

    def code(self, dtype: str) -> Code:
        """The same as a difference to the previous version."""
        size = SIZES[dtype]
        return Code(round(SMALL * size.element), self.elements * size.element, self.elements)


def chunks_of(parameters: int, fragments: int) -> int:
    """Chunks of a fragment as they travel."""
    return max(1, math.ceil(parameters / fragments / CHUNK_ELEMENTS))


@dataclass(frozen=True, eq=False)
class Scene:
    """The world, the question, the pieces, the costs, and the cores."""

    world: World
    question: Question
    pieces: Pieces
    costs: Costs
    cores: Hub

    def clock(self) -> float:
        """The seconds that core and sessions see."""
        return self.world.now / self.pieces.chunks

    def wire_seconds(self, size: float) -> float:
        """CPU seconds of ZeroMQ's thread for `size` bytes of chunks, at either end."""
        costs = self.costs
        return size / GIGA * (costs.wire + (costs.keys if self.question.has_keys else 0.0))

    @property
    def message_seconds(self) -> float:
        """CPU seconds for the messages of one piece."""
        return self.costs.message * self.pieces.chunks

    @property
    def billions(self) -> float:
        """Elements of a piece."""
        return self.pieces.elements / GIGA
