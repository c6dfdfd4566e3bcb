"""How much memory a run's tensors will take, so that it can be mapped before it is needed."""

from __future__ import annotations

from diloco_protocol.chunks import ChunkSpan, ModelLayout, Segment
from diloco_protocol.codecs import segment_dtype

# Chunks of memory that are between two uses.
BETWEEN = 4


def pool_sizes(layout: ModelLayout, *, remembered: int, means: bool) -> list[int]:
    """Bytes of each chunk of everything that there will be.

    Args:
        layout: how the model is cut.
        remembered: tensors of the size of a chunk that the outer optimizer remembers of it.
        means: whether contributions are added up as they come.
    """
    every = [bytes_of(span) for part in layout.all for span in part.spans]
    steps = [
        [bytes_of(span) for span in part.spans if span.segment is Segment.PARAMETERS]
        for part in layout.fragments
    ]
    moved = [size for part in steps for size in part]
    sums = max(steps, key=sum, default=[]) if means else []
    # Those between two uses: readers still hold them when the chunk in their place is made.
    between = [max(moved, default=0)] * BETWEEN
    return [*every, *moved * remembered, *sums, *between]


def bytes_of(span: ChunkSpan) -> int:
    """Of a chunk at the broker."""
    return span.elements * segment_dtype(span.segment).itemsize
