"""Converts a chunk to the dtype of replies, and checks that its values are finite there."""

from __future__ import annotations

import math

from torch import Tensor

from diloco_broker.tensors.memory import empty
from diloco_protocol.chunks import ChunkSpan, Segment
from diloco_protocol.tensors.codecs import has_nan, is_finite, segment_dtype


class Reply:
    """The wire form of one chunk, made at once or slice by slice while the chunk is computed.

    `wire` is the dtype of parameters in replies. A `frozen` chunk may contain infinities (a causal
    mask), but not NaN.
    """

    def __init__(self, span: ChunkSpan, wire: str, *, frozen: bool = False) -> None:
        self._is_frozen = frozen
        self._span = span
        self._dtype = segment_dtype(span.segment, wire)
        self._encoded: Tensor | None = None
        self._added = 0
        self._sum = 0.0

    def add(self, piece: Tensor) -> None:
        """Add the next values of the chunk, while they are in the cache."""
        if piece.dtype is not self._dtype:
            if self._encoded is None:
                self._encoded = empty(self._span.elements, self._dtype)
            start, self._added = self._added, self._added + piece.numel()
            piece = self._encoded[start : self._added].copy_(piece)
        else:
            self._added += piece.numel()
        self._sum += piece.sum().item()

    def of(self, values: Tensor) -> Tensor | None:
        """The chunk in wire form; None if it has a forbidden value there.

        Without a conversion this is the tensor itself, shared by all readers without a copy.
        """
        is_made = self._added == self._span.elements
        reply = values if self._encoded is None else self._encoded
        if not is_made and values.dtype is not self._dtype:
            reply = empty(self._span.elements, self._dtype).copy_(values)
        if self._span.segment is Segment.INTEGERS:
            return reply
        if self._is_frozen:
            return None if has_nan(reply) else reply
        # A finite sum means that all elements are finite; an infinite one may be due to large elements.
        is_fine = is_made and math.isfinite(self._sum)
        return reply if is_fine or is_finite(reply) else None
