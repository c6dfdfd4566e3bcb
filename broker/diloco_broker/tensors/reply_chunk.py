"""A chunk as it is sent to workers: in the reply's dtype, and known to hold nothing bad there."""

from __future__ import annotations

import math

from torch import Tensor

from diloco_broker.tensors.memory import empty
from diloco_protocol.chunks import ChunkSpan, Segment
from diloco_protocol.tensors.codecs import has_nan, is_finite, segment_dtype


class Reply:
    """The wire form of one chunk, made of it at once or piece by piece while it is being made.

    `wire` is what parameters travel in on their way down. A chunk of the `frozen` part may hold
    infinities (a causal mask); NaN never.
    """

    def __init__(self, span: ChunkSpan, wire: str, *, frozen: bool = False) -> None:
        self._is_frozen = frozen
        self._span = span
        self._dtype = segment_dtype(span.segment, wire)
        self._encoded: Tensor | None = None
        self._added = 0
        self._sum = 0.0

    def add(self, piece: Tensor) -> None:
        """The next values of the chunk; they are still near."""
        if piece.dtype is not self._dtype:
            if self._encoded is None:
                self._encoded = empty(self._span.elements, self._dtype)
            start, self._added = self._added, self._added + piece.numel()
            piece = self._encoded[start : self._added].copy_(piece)
        else:
            self._added += piece.numel()
        self._sum += piece.sum().item()

    def of(self, values: Tensor) -> Tensor | None:
        """The chunk as it is sent; None when it has values there that may not be.

        Without a conversion this is the tensor itself: no copy, shared by all readers.
        """
        is_made = self._added == self._span.elements
        reply = values if self._encoded is None else self._encoded
        if not is_made and values.dtype is not self._dtype:
            reply = empty(self._span.elements, self._dtype).copy_(values)
        if self._span.segment is Segment.INTEGERS:
            return reply
        if self._is_frozen:
            return None if has_nan(reply) else reply
        # The sum is finite only if every element is; one that is not may be of large elements.
        is_fine = is_made and math.isfinite(self._sum)
        return reply if is_fine or is_finite(reply) else None
