"""Laying tensors out in wire form: what a model holds of a version minus them, or they themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor

from diloco_protocol import Segment
from diloco_protocol.chunks import FragmentLayout, Place
from diloco_protocol.tensors.codecs import is_finite, segment_dtype
from diloco_protocol.tensors.tensor_pool import mapped
from diloco_worker.model.flat_state import FlatState, held

# Elements handled at a time: two fp32 pieces of this size stay in a core's second-level cache.
PIECE_ELEMENTS = 1 << 17
# Wire dtypes that reach as far as fp32.
_WIDE = (torch.float32, torch.bfloat16)
# Returns an uninitialised vector.
Room = Callable[[int, torch.dtype], Tensor]


@dataclass(frozen=True)
class Delta:
    """A frozen pseudo-gradient in wire form."""

    wire: FlatState  # global minus local; of buffers and integers the local values
    norm: float  # Euclidean length of the parameters' part, before rounding to the wire dtype
    bad: str | None  # a tensor that has NaN or infinity after encoding


@dataclass(eq=False, repr=False)
class Encoding:
    """A fragment that is laid out tensor by tensor, on the host."""

    layout: FragmentLayout
    dtype: str  # the wire dtype
    base: FlatState | None = None  # what is measured from; None: tensors are laid out as they are
    room: InitVar[Room] = mapped
    squares: float = 0.0  # of what is laid out of parameters, before rounding to the wire dtype
    bad: str | None = None  # the first place that has NaN or infinity after encoding
    wire: dict[Segment, Tensor] = field(init=False)

    def __post_init__(self, room: Room) -> None:
        self.wire = {
            segment: room(length, segment_dtype(segment, self.dtype))
            for segment, length in self.layout.lengths.items()
            if length
        }
        self._piece = torch.empty(PIECE_ELEMENTS, dtype=torch.float32)

    @torch.no_grad()
    def add(self, place: Place, values: Tensor) -> None:
        """Lay out one tensor. Buffers and integers are always taken as they are."""
        given = values.detach().reshape(-1)
        if place.start == place.stop:
            return
        if place.segment is not Segment.PARAMETERS:
            stored = self.wire[place.segment][place.start : place.stop].copy_(given)
            if not is_finite(stored):
                self.bad = self.bad or place.entry.name
            return
        for start in range(place.start, place.stop, PIECE_ELEMENTS):
            stop = min(start + PIECE_ELEMENTS, place.stop)
            self._add_piece(place, start, stop, given[start - place.start : stop - place.start])

    def _add_piece(self, place: Place, start: int, stop: int, local: Tensor) -> None:
        values = self._piece[: stop - start]
        if local.dtype is not torch.float32 or self.base is None:
            local = values.copy_(local)
        if self.base is not None:
            begun = held(self.base.vectors[place.segment][start:stop], place.entry).cpu()
            torch.sub(begun, local, out=values)
        encoded = self.wire[place.segment][start:stop]
        encoded.copy_(values)
        # Finite squares have finite roots, far below what bf16 can hold: no second look at them.
        square = float(torch.dot(values, values))
        is_fine = math.isfinite(square) and encoded.dtype in _WIDE
        if not is_fine and not is_finite(encoded):
            self.bad = self.bad or place.entry.name
            return
        if not math.isfinite(square):  # large elements: fp64 has room for their squares
            square = float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
        self.squares += square

    @property
    def delta(self) -> Delta:
        """What was laid out."""
        state = FlatState(self.layout, self.wire, self.dtype)
        return Delta(state, math.sqrt(self.squares), self.bad)


def encode(
    layout: FragmentLayout,
    tensors: Mapping[str, Tensor],
    dtype: str,
    base: FlatState | None = None,
    room: Room = mapped,
) -> Delta:
    """Lay tensors out in wire form: what a model holds of `base` minus them, or they themselves."""
    encoding = Encoding(layout, dtype, base, room)
    for place in layout.places:
        encoding.add(place, tensors[place.entry.name])
    return encoding.delta


@torch.no_grad()
def encode_there(base: FlatState, tensors: Mapping[str, Tensor], dtype: str, room: Room) -> Delta:
    """The same as `encode` where the base is: only what travels comes to the host."""
    layout = base.layout
    wire = {
        segment: room(length, segment_dtype(segment, dtype))
        for segment, length in layout.lengths.items()
        if length
    }
    squares, bad = 0.0, None
    for place in layout.places:
        if place.start == place.stop:
            continue
        target = wire[place.segment][place.start : place.stop].view(place.entry.shape)
        values = tensors[place.entry.name].detach()
        if place.segment is Segment.PARAMETERS:
            begun = base.held(place)
            values = begun - values.to(begun.device, torch.float32)
            squares += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
        values = values.to(target.dtype)
        target.copy_(values)
        if not is_finite(values):
            bad = bad or place.entry.name
    return Delta(FlatState(layout, wire, dtype), math.sqrt(squares), bad)
