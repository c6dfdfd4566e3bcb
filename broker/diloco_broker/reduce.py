"""Turning contributions into one gradient, chunk by chunk.

The streaming mean adds each chunk to one accumulator as it arrives, so memory does not depend on the
number of workers. The staged reducer has the chunks of whole submissions before it, in a given order,
and makes a gradient of them with one of `AGGREGATES`. What reached a chunk, and with which weight, is
the core's business; here are only the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from diloco_broker.events import Part
from diloco_protocol.buffers import Buffers
from diloco_protocol.chunks import ChunkSpan, FragmentLayout, Segment
from diloco_protocol.codecs import from_bytes, is_finite, segment_dtype, wire_dtype

Aggregate = Callable[[Iterable[Tensor], Sequence[Part]], Tensor]
"""Makes a gradient of the same chunk of several submissions.

The chunks come one at a time, fp32, in the order of the parts; each may be read until the next one is
asked for, and must not be changed. The result is a new fp32 tensor.
"""


def mean(chunks: Iterable[Tensor], parts: Sequence[Part]) -> Tensor:
    """sum(w_i s_i x_i) / sum(w_i), with weight w_i, scale s_i and chunk x_i of part i.

    The same operations in the same order as `StreamingMean`: where scales are 1, the same bits.
    """
    return _weighted_mean(chunks, parts, [1.0] * len(parts))


def clip_median_norm(chunks: Iterable[Tensor], parts: Sequence[Part]) -> Tensor:
    """The mean of x_i min(1, median/|x_i|): none counts longer than the median submission.

    |x_i| is the length of the whole submission, so its direction stays as it was.
    """
    middle = median(part.norm for part in parts)
    return _weighted_mean(
        chunks, parts, [min(1.0, middle / part.norm) if part.norm else 1.0 for part in parts]
    )


AGGREGATES: dict[str, Aggregate] = {"mean": mean, "clip-median-norm": clip_median_norm}


def _weighted_mean(
    chunks: Iterable[Tensor], parts: Sequence[Part], factors: Sequence[float]
) -> Tensor:
    total: Tensor | None = None
    for chunk, part, factor in zip(chunks, parts, factors, strict=True):
        weight = part.weight * part.scale * factor
        if total is None:
            total = torch.mul(chunk, weight)
        else:
            total.add_(chunk, alpha=weight)
    assert total is not None, "a group without parts has no mean"
    return total.div_(sum(part.weight for part in parts))


class StreamingMean:
    """Accumulators of one fragment: fp32 sums of weighted chunks, or the maximum of integers.

    An accumulator is there from the first of its chunks to arrive until it is taken.

    Args:
        layout: the fragment's chunks.
        wire_dtype: what parameters travel in.
        buffers: where memory for accumulators comes from.
    """

    def __init__(
        self, layout: FragmentLayout, wire_dtype: torch.dtype, buffers: Buffers | None = None
    ) -> None:
        self._spans = layout.spans
        self._buffers = buffers or Buffers()
        self._wire_dtype = wire_dtype
        self._sums: list[Tensor | None] = [None] * layout.chunks
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
        total = self._sums[index]
        if total is None:
            total = self._sums[index] = self._buffers.take(span.elements, torch.float32)
            torch.mul(values, weight, out=total)
        else:
            total.add_(values, alpha=weight)
        return True

    def take(self, index: int, weight: float) -> Tensor | None:
        """The mean (or maximum) of a chunk, and nothing added up any more; None if nothing reached it.

        The tensor is the caller's. Once it lets go, its memory is there for the chunk that was made:
        so accumulators and the new version together take no more than the accumulators did.
        """
        total, self._sums[index] = self._sums[index], None
        if total is None or self._spans[index].segment is Segment.INTEGERS:
            return total
        return total.div_(weight)

    def _fold_maximum(self, index: int, values: Tensor) -> None:
        total = self._sums[index]
        if total is None:
            self._sums[index] = values.clone()
        else:
            torch.maximum(total, values, out=total)

    def _as_fp32(self, values: Tensor, span: ChunkSpan) -> Tensor:
        if values.dtype is torch.float32:
            return values
        return self._scratch[: span.elements].copy_(values)


class StagedReducer:
    """Looks at chunks of whole submissions, and makes gradients of them.

    Args:
        aggregate: what parameters are merged with, one of `AGGREGATES`. Buffers always take the mean,
            integers the maximum.
        longest: elements of the largest chunk.
    """

    def __init__(self, aggregate: str, longest: int) -> None:
        self._aggregate = AGGREGATES[aggregate]
        self._scratch = torch.empty(longest, dtype=torch.float32)

    def squares(self, span: ChunkSpan, payload: Any, dtype: str) -> float | None:
        """The sum of a chunk's squared values, in fp64; None when one is NaN or infinite.

        0 unless it is of parameters: they alone make the length of a submission.

        Args:
            span: which chunk.
            payload: its bytes in wire form, of the right length.
            dtype: name of the wire dtype of parameters.
        """
        if span.segment is Segment.INTEGERS:
            return 0.0
        values = self._decode(span, payload, dtype)
        if not is_finite(values):
            return None
        if span.segment is Segment.BUFFERS:
            return 0.0
        exact = values.double()  # fp32 squares overflow from 1.8e19 on
        return float(torch.dot(exact, exact))

    def gradient(self, span: ChunkSpan, parts: Sequence[Part]) -> Tensor | None:
        """What a group of submissions makes of a chunk, in a new tensor; None without parts."""
        if not parts:
            return None
        chunks = self._decoded(span, parts)
        match span.segment:
            case Segment.INTEGERS:
                largest = next(chunks).clone()
                for chunk in chunks:
                    torch.maximum(largest, chunk, out=largest)
                return largest
            case Segment.BUFFERS:
                return mean(chunks, parts)
            case Segment.PARAMETERS:
                return self._aggregate(chunks, parts)

    def _decoded(self, span: ChunkSpan, parts: Sequence[Part]) -> Iterator[Tensor]:
        return (self._decode(span, part.payload, part.wire_dtype) for part in parts)

    def _decode(self, span: ChunkSpan, payload: Any, dtype: str) -> Tensor:
        values = from_bytes(payload, segment_dtype(span.segment, wire_dtype(dtype)))
        if values.dtype in (torch.float32, torch.int64):
            return values
        return self._scratch[: span.elements].copy_(values)
