"""Turning contributions into one gradient, chunk by chunk.

The streaming mean adds each chunk to one accumulator as it arrives, so memory does not depend on the
number of workers. What reached a chunk, and with which weight, is the core's business; here are only
the tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diloco_protocol.chunks import ChunkSpan, FragmentLayout, Segment
from diloco_protocol.codecs import from_bytes, is_finite, segment_dtype


class StreamingMean:
    """Accumulators of one fragment: fp32 sums of weighted chunks, or the maximum of integers.

    An accumulator is allocated when its chunk first arrives and kept for the rounds to come.

    Args:
        layout: the fragment's chunks.
        wire_dtype: what parameters travel in.
    """

    def __init__(self, layout: FragmentLayout, wire_dtype: torch.dtype) -> None:
        self._spans = layout.spans
        self._wire_dtype = wire_dtype
        self._sums: list[Tensor | None] = [None] * layout.chunks
        self._is_empty = [True] * layout.chunks
        # Adding bf16 to fp32 directly runs at a seventh of the speed of copying it here first.
        longest = max((span.elements for span in layout.spans), default=0)
        self._scratch = torch.empty(longest, dtype=torch.float32)

    def fold(self, index: int, payload: Any, weight: float) -> bool:
        """Add a chunk. Returns False, with nothing changed, when it is not finite.

        Args:
            index: chunk number.
            payload: its bytes in wire form, of the right length.
            weight: finite and positive; ignored for integers.
        """
        span = self._spans[index]
        values = from_bytes(payload, segment_dtype(span.segment, self._wire_dtype))
        if span.segment is Segment.INTEGERS:
            self._fold_maximum(index, values)
            return True
        values = self._as_fp32(values, span)
        if not is_finite(values):
            return False
        total = self._sum(index, torch.float32)
        if self._is_empty[index]:
            torch.mul(values, weight, out=total)
        else:
            total.add_(values, alpha=weight)
        self._is_empty[index] = False
        return True

    def take(self, index: int, weight: float) -> Tensor | None:
        """The mean (or maximum) of a chunk, and an empty accumulator; None if nothing reached it.

        The tensor is the accumulator itself: the caller may use it as scratch, and must be done with
        it before the next fold.
        """
        total = self._sums[index]
        if self._is_empty[index] or total is None:
            return None
        self._is_empty[index] = True
        if self._spans[index].segment is Segment.INTEGERS:
            return total
        return total.div_(weight)

    def _fold_maximum(self, index: int, values: Tensor) -> None:
        total = self._sum(index, torch.int64)
        if self._is_empty[index]:
            total.copy_(values)
        else:
            torch.maximum(total, values, out=total)
        self._is_empty[index] = False

    def _as_fp32(self, values: Tensor, span: ChunkSpan) -> Tensor:
        if values.dtype is torch.float32:
            return values
        return self._scratch[: span.elements].copy_(values)

    def _sum(self, index: int, dtype: torch.dtype) -> Tensor:
        total = self._sums[index]
        if total is None:
            total = torch.empty(self._spans[index].elements, dtype=dtype)
            self._sums[index] = total
        return total
