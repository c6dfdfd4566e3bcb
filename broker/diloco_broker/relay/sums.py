"""The tensors of a relay: a look at chunks that it holds, and their weighted means.

A quantized mean is sent with the residual of its chunk (error feedback, as the worker's
`model.feedback` has it for what it sends itself): what the last mean has left out. A residual ends with
the process; then it begins at zero, as with a worker that dies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diloco_broker.core.effects import WholePush
from diloco_broker.relay.core import Term
from diloco_broker.tensors.aggregate import StagedReducer, add_up, source_of
from diloco_broker.tensors.fingerprint import fingerprint_of
from diloco_broker.tensors.memory import empty
from diloco_protocol.chunks import CHUNK_ELEMENTS, ChunkSpan, Segment
from diloco_protocol.dtypes import is_quantized
from diloco_protocol.tensors.codecs import add_code, encode_chunk, encode_sum, segment_dtype


class TensorSums:
    """See the head of this module; it implements `relay.core.Sums`."""

    def __init__(self) -> None:
        self._reducer = StagedReducer("mean", CHUNK_ELEMENTS)
        self._residuals: dict[tuple[int, int], Tensor] = {}  # by fragment and index, fp32

    def inspect(self, span: ChunkSpan, payload: Any, wire_dtype: str) -> tuple[float | None, int]:
        try:
            squares = self._reducer.squares(span, payload, wire_dtype)
        except ValueError:  # of another length than the chunk's, which the hub finds, too
            squares = None
        return squares, fingerprint_of(span.index, payload) if squares else 0

    def reset(self) -> None:
        self._residuals.clear()

    def mean(self, fragment: int, span: ChunkSpan, terms: list[Term], wire_dtype: str) -> Any:
        if span.segment is not Segment.PARAMETERS:
            parts = [
                WholePush("", 0, each.weight, 1.0, 0.0, each.wire_dtype, {span.index: each.payload})
                for each in terms
            ]
            found = self._reducer.reduced(span, parts)
            assert found is not None, "a mean without terms"
            return encode_chunk(span, found.whole(), wire_dtype)
        weighted = [(source_of(span, t.payload, t.wire_dtype), t.weight) for t in terms]
        divisor = sum(each.weight for each in terms)
        mean = add_up(weighted, divisor, empty(span.elements, torch.float32))
        if not is_quantized(wire_dtype):
            return encode_chunk(span, mean.to(segment_dtype(span.segment, wire_dtype)), wire_dtype)
        return self._quantized((fragment, span.index), span, mean, wire_dtype)

    def _quantized(
        self, key: tuple[int, int], span: ChunkSpan, mean: Tensor, wire_dtype: str
    ) -> Any:
        residual = self._residuals.get(key)
        summed = None if residual is None else encode_sum(wire_dtype, mean, residual)
        if summed is None:  # the first, or beyond the range of fp32: then the residual is given up
            residual = None
        code = encode_chunk(span, mean, wire_dtype) if summed is None else summed.payload
        left = empty(span.elements, torch.float32)
        add_code(wire_dtype, code, mean, left, other=residual, sign=-1.0)
        self._residuals[key] = left
        return code
