"""A fragment of the model as flat vectors, and as the payload of a push.

A version is fp32, whatever the model is. A model in bf16 or fp16 holds it rounded (`held`), so every
difference is measured from the rounded values: else the rounding would be sent as trained, and progress
of less than half an ulp would be undone round by round.

Each fragment has up to three vectors (docs/specification.md, section 3): parameters and float
buffers in fp32, integers in int64. Memory of a worker, in units of the fp32 parameters: the global
parameters (1), the delta in wire dtype (1/2 with bf16; 1 when quantized), and the arriving version (1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco_protocol import ProtocolError, Segment, TensorEntry
from diloco_protocol.chunks import FragmentLayout, Place
from diloco_protocol.tensors.codecs import add_code, decode_chunk, encode_chunk, segment_dtype
from diloco_protocol.tensors.tensor_pool import mapped


@dataclass(frozen=True)
class FlatState:
    """The values of one fragment, or its delta: a flat vector for each segment that is not empty.

    Values being sent, and bases, never change.
    """

    layout: FragmentLayout  # where each tensor lies
    # fp32 for parameters (except a delta's) and buffers, int64 for integers; contiguous. On the CPU,
    # except a base that is kept elsewhere, and the parameters of a quantized delta of an accelerator.
    vectors: Mapping[Segment, Tensor]
    dtype: str = "fp32"  # the wire dtype of the parameters

    @classmethod
    def empty(cls, layout: FragmentLayout, *, pinned: bool = False) -> FlatState:
        """Uninitialised values of a fragment."""
        vectors = {
            segment: torch.empty(length, dtype=segment_dtype(segment), pin_memory=True)
            if pinned
            else mapped(length, segment_dtype(segment))
            for segment, length in layout.lengths.items()
            if length
        }
        return cls(layout, vectors)

    @property
    def device(self) -> torch.device:
        return next((vector.device for vector in self.vectors.values()), torch.device("cpu"))

    def to(self, device: torch.device) -> FlatState:
        """The same on this device; itself where it is there. Returns when all is copied."""
        if self.device == device:
            return self
        vectors = {segment: vector.to(device) for segment, vector in self.vectors.items()}
        return FlatState(self.layout, vectors, self.dtype)

    def of(self, place: Place) -> Tensor:
        """The values of one tensor, in its shape: a view."""
        if place.segment not in self.vectors:  # it has no elements
            return torch.empty(place.entry.shape, dtype=segment_dtype(place.segment))
        return self.vectors[place.segment][place.start : place.stop].view(place.entry.shape)

    def held(self, place: Place) -> Tensor:
        """The values of one tensor as a model holds them: rounded to its dtype."""
        return held(self.of(place), place.entry)

    def store(self, index: int, payload: memoryview, wire: str) -> None:
        """Decode a received chunk into its place; the payload has the right length."""
        span = self.layout.spans[index]
        target = self.vectors[span.segment][span.start : span.stop]
        values = decode_chunk(span, payload, wire, target)
        if values.data_ptr() != target.data_ptr():
            target.copy_(values)

    def follow(
        self, index: int, base: FlatState, payload: memoryview, parts: Sequence[int], wire: str
    ) -> int | None:
        """Decode a chunk of parameters that is a difference from that of `base`, into its place.

        Args:
            parts: the lengths in bytes of the codes to be added, in order; their sum is the payload's.

        Returns:
            The checksum of the result; None if the codes cannot be decoded or the result is not finite.
        """
        span = self.layout.spans[index]
        target = self.vectors[span.segment][span.start : span.stop]
        before = base.vectors[span.segment][span.start : span.stop]
        if before.data_ptr() == target.data_ptr():
            before = target
        start, found = 0, None
        for size in parts:
            code = payload[start : start + size]
            try:
                found = add_code(wire, code, before, target)
            except ProtocolError:
                return None
            before, start = target, start + size
        return found

    def by_name(self) -> dict[str, Tensor]:
        """The values of each tensor, in its shape: views."""
        return {place.entry.name: self.of(place) for place in self.layout.places}

    def chunk(self, index: int) -> memoryview:
        """The bytes of one chunk, which share this memory."""
        span = self.layout.spans[index]
        return encode_chunk(span, self.vectors[span.segment][span.start : span.stop], self.dtype)

    def taken_from(self, base: FlatState) -> FlatState:
        """The model when this delta was frozen: its `base` minus the delta, rounded."""
        state = FlatState.empty(self.layout)
        for place in self.layout.places:
            if place.segment is Segment.PARAMETERS:
                torch.sub(base.held(place).cpu(), self.of(place).cpu(), out=state.of(place))
            else:
                state.of(place).copy_(self.of(place))
        return state


def held(values: Tensor, entry: TensorEntry) -> Tensor:
    """Values of a version (fp32) as a tensor of the model holds them, in fp32 again."""
    if entry.dtype not in _NARROW:
        return values
    return values.to(_NARROW[entry.dtype]).to(values.dtype)


# Dtypes of a model that round fp32.
_NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
