"""Aggregates contributions into one gradient, chunk by chunk.

The streaming mean holds the few chunks that arrived last and adds all others to one accumulator, so
memory does not depend on the number of workers. The staged reducer takes the chunks of complete pushes
in a given order, and aggregates them with one of `robust.AGGREGATES`. The core decides which
contributions count, and with which weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diloco_broker.core.effects import WholePush
from diloco_broker.tensors.blend import Blend
from diloco_broker.tensors.memory import empty
from diloco_broker.tensors.piece import Piece, Scratch
from diloco_broker.tensors.robust import (
    AGGREGATES,
    BY_COORDINATE,
    Stretches,
    largest_of_the_middle,
    mean_by_stretch,
)
from diloco_protocol import kernels
from diloco_protocol.chunks import ChunkSpan, FragmentLayout, Segment
from diloco_protocol.dtypes import is_quantized
from diloco_protocol.errors import ProtocolError
from diloco_protocol.kernels import Source, Terms
from diloco_protocol.tensors.codecs import BLOCKS, decode_chunk, is_finite

# Contributions that are held undecoded: 1 MiB each in bf16, 2 MiB in fp32.
HELD = 6


class Gradient:
    """The aggregated gradient of one chunk. Read it once, `whole` or as `terms`.

    Args:
        total: the accumulated sum, or None; reading overwrites its memory.
        waiting: further contributions in wire dtype, each with its weight.
        divisor: divides the sum.
    """

    def __init__(self, total: Tensor | None, waiting: Terms, divisor: float) -> None:
        assert total is not None or waiting, "a gradient without contributions"
        self._total = total
        self._waiting = waiting
        self._divisor = divisor

    @classmethod
    def of(cls, values: Tensor) -> Gradient:
        """Wrap a computed gradient of fp32 parameters or int64 integers; its memory is overwritten."""
        return cls(values, (), 1.0)

    def whole(self) -> Tensor:
        """The gradient in one tensor, which the caller owns."""
        total = self._total
        if total is not None and not self._waiting:
            return total if self._divisor == 1 else total.div_(self._divisor)
        out = empty(self._waiting[0][0].elements, torch.float32) if total is None else total
        return add_up(*self.terms(), out)

    def terms(self) -> tuple[Terms, float]:
        """Weighted chunks of parameters, and the divisor of their sum."""
        if self._total is None:
            return self._waiting, self._divisor
        return [(Source.of(self._total), 1.0), *self._waiting], self._divisor


def add_up(terms: Terms, divisor: float, out: Tensor) -> Tensor:
    """out <- sum(w_i x_i) / divisor, in fp32; `out` may be the memory of the first term."""
    fast = kernels.ready()
    if fast is not None:
        fast.add_up(terms, divisor, out)
        return out
    (first, weight), *others = terms
    out.copy_(first.values())
    if weight != 1:
        out.mul_(weight)
    for source, weight in others:
        values = source.values()
        if values.dtype is not torch.float32:  # adding bf16 takes three to seven times as long
            values = empty(source.elements, torch.float32).copy_(values)
        out.add_(values, alpha=weight)
    return out if divisor == 1 else out.div_(divisor)


def source_of(span: ChunkSpan, payload: Any, wire: str) -> Source:
    """Read a chunk of parameters; it is decoded unless kernels do that while they add it."""
    if kernels.ready() is not None and wire in BLOCKS:
        return BLOCKS[wire].source(payload, span.elements)
    out = empty(span.elements, torch.float32) if is_quantized(wire) else None
    return Source.of(decode_chunk(span, payload, wire, out))


def _read(span: ChunkSpan, payload: Any, wire: str) -> tuple[Source, float] | None:
    """Read a chunk of parameters and its sum of squares; None if a value is not finite."""
    fast, chunk = kernels.ready(), source_of(span, payload, wire)
    squares: float | None
    if fast is None or wire not in BLOCKS:  # torch sums squares at memory speed
        squares = squares_of(chunk.values())
    elif (squares := fast.squares(chunk)) is None:  # beyond the range of fp32, or not finite
        squares = squares_of(decode_chunk(span, payload, wire))
    return None if squares is None else (chunk, squares)


def squares_of(values: Tensor) -> float | None:
    """The sum of squared floats; None if one is NaN or infinite.

    It replaces a separate check for finite values: a sum of squares is finite only if all values are. It
    has two correct digits in bf16, five in fp16 and fp32.
    """
    if values.dtype is torch.float32:
        squares = float(torch.dot(values, values))
    else:
        # fp16 overflows above 65504. bf16 does not, and a bf16 result takes half the time.
        dtype = torch.float32 if values.dtype is torch.float16 else None
        squares = float(torch.linalg.vector_norm(values, dtype=dtype)) ** 2
    return squares if math.isfinite(squares) else exact_squares(values)


def exact_squares(values: Tensor) -> float | None:
    """The same in fp64: squares of fp32 values above 1.8e19 overflow."""
    if not is_finite(values):
        return None
    exact = values.double()
    return float(torch.dot(exact, exact))


class StreamingMean:
    """Accumulators of one fragment: weighted fp32 sums of parameters, a `Blend` of buffers, the maximum
    of integers.

    The latest contributions are not added at once but held undecoded. Usually the other contributions to
    the same chunk arrive soon; then kernels add them during the outer step, and the sum is never written
    to memory. At most `HELD` contributions are `held`, over all chunks.

    `wire` is the default wire dtype of parameters.
    """

    def __init__(self, layout: FragmentLayout, wire: str) -> None:
        self._spans = layout.spans
        self._wire = wire
        self._sums: list[Tensor | None] = [None] * layout.chunks
        self._blends: dict[int, Blend] = {}  # of float buffers, by chunk
        # Held contributions by chunk, the one that has waited longest first.
        self._waiting: dict[int, list[tuple[Source, float]]] = {}
        self.held = 0

    def fold(
        self, index: int, payload: Any, weight: float, wire: str | None = None
    ) -> Piece[float | None]:
        """Add a chunk of a push. Afterwards call `overdue`, and do the work of `adding_up`.

        Args:
            payload: its bytes in wire form, of the correct length, which must not be modified later.
            weight: finite and positive; ignored for integers.

        Returns:
            The unweighted sum of its squared values; 0 unless they are parameters. None if a value is
            not finite or the bytes cannot be decoded; the chunk is then not added.
        """
        span, wire = self._spans[index], wire or self._wire

        def read() -> tuple[Any, float] | None:
            try:
                if span.segment is Segment.PARAMETERS:
                    return _read(span, payload, wire)
                values = decode_chunk(span, payload, wire)
            except ProtocolError:
                return None
            is_fine = span.segment is Segment.INTEGERS or is_finite(values)
            return (values, 0.0) if is_fine else None

        def take_in(found: tuple[Any, float] | None) -> float | None:
            if found is None:
                return None
            values, squares = found
            match span.segment:
                case Segment.INTEGERS:
                    self._fold_maximum(index, values)
                case Segment.BUFFERS:
                    self._blends.setdefault(index, Blend()).add(values, weight)
                case Segment.PARAMETERS:
                    self._waiting.setdefault(index, []).append((values, weight))
                    self.held += 1
            return squares

        return Piece(read, take_in)

    def overdue(self) -> int | None:
        """The chunk that has waited longest if more than `HELD` contributions are held; else None."""
        return next(iter(self._waiting)) if self.held > HELD else None

    def adding_up(self, index: int) -> Piece[None]:
        """Work that adds the held contributions of a chunk to its accumulator."""
        waiting, total = self._waiting.pop(index), self._sums[index]
        self._sums[index] = None
        self.held -= len(waiting)

        def put(total: Tensor) -> None:
            self._sums[index] = total

        return Piece(Gradient(total, waiting, 1.0).whole, put)

    def take(self, index: int, weight: float) -> Gradient | Blend | None:
        """Take the mean (or maximum) of a chunk and reset it; None if it has no contributions."""
        if self._spans[index].segment is Segment.BUFFERS:
            return self._blends.pop(index, None)
        total, self._sums[index] = self._sums[index], None
        waiting = self._waiting.pop(index, [])
        self.held -= len(waiting)
        if total is None and not waiting:
            return None
        divisor = 1.0 if self._spans[index].segment is Segment.INTEGERS else weight
        return Gradient(total, waiting, divisor)

    def _fold_maximum(self, index: int, values: Tensor) -> None:
        total = self._sums[index]
        if total is None:
            self._sums[index] = values.clone()
        else:
            torch.maximum(total, values, out=total)


class StagedReducer:
    """Inspects chunks of complete pushes, and aggregates them into gradients.

    Args:
        aggregate: aggregate of parameters, one of `AGGREGATES`. If it works by coordinate, float buffers
            use it too, and integers take the upper median; else buffers are blended, and integers take
            the maximum.
        longest: elements of the largest chunk.
        trim: share of pushes that `trimmed-mean` leaves out at each end.
    """

    def __init__(self, aggregate: str, longest: int, trim: float = 0.2) -> None:
        self._aggregate = AGGREGATES[aggregate](trim)
        self._by_coordinate = aggregate in BY_COORDINATE
        self._scratch = Scratch(1, longest)

    def squares(self, span: ChunkSpan, payload: Any, dtype: str) -> float | None:
        """The sum of a chunk's squared values, in fp64; None if one is NaN, infinite or unreadable.

        0 unless it has parameters: only they count for the norm of a push.
        """
        if span.segment is Segment.INTEGERS:
            return 0.0
        try:
            values = self.decode(span, payload, dtype)
        except ProtocolError:
            return None
        if span.segment is Segment.BUFFERS:
            return 0.0 if is_finite(values) else None
        return exact_squares(values)

    def reduced(
        self, span: ChunkSpan, parts: Sequence[WholePush], stretches: Stretches = ()
    ) -> Gradient | Blend | None:
        """Aggregate the same chunk of a group of pushes; None if the group is empty.

        With `stretches` a chunk of parameters takes their mean instead.
        """
        if not parts:
            return None
        chunks = (self.decode(span, each.payloads[span.index], each.wire_dtype) for each in parts)
        match span.segment:
            case Segment.INTEGERS if self._by_coordinate:
                return Gradient.of(largest_of_the_middle([chunk.clone() for chunk in chunks]))
            case Segment.INTEGERS:
                largest = next(chunks).clone()
                for chunk in chunks:
                    torch.maximum(largest, chunk, out=largest)
                return Gradient.of(largest)
            case Segment.BUFFERS:
                blend = Blend()
                if self._by_coordinate:
                    blend.add(self._aggregate(chunks, parts), 1.0)
                    return blend
                for chunk, part in zip(chunks, parts, strict=True):
                    blend.add(chunk, part.weight, part.scale)
                return blend
            case Segment.PARAMETERS if stretches:
                return Gradient.of(mean_by_stretch(chunks, parts, stretches))
            case Segment.PARAMETERS:
                return Gradient.of(self._aggregate(chunks, parts))

    def decode(self, span: ChunkSpan, payload: Any, dtype: str) -> Tensor:
        """The values of a chunk, fp32 or int64, valid until the next call in this thread."""
        is_decoded = span.segment is Segment.PARAMETERS and is_quantized(dtype)
        out = self._scratch.rows[0, : span.elements] if is_decoded else None
        values = decode_chunk(span, payload, dtype, out)
        if values.dtype in (torch.float32, torch.int64):
            return values
        return self._scratch.rows[0, : span.elements].copy_(values)
