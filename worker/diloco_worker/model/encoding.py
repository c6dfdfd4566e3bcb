"""Encodes tensors in wire form: a version minus the model, or the tensors themselves.

It works on the device of the tensors, piece by piece; only the payload comes to the host. When
quantized that is the codes, so the values to encode stay on the device (`feedback`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor

from diloco_protocol import Segment
from diloco_protocol.chunks import FragmentLayout, Place
from diloco_protocol.dtypes import is_quantized
from diloco_protocol.tensors.codecs import is_finite, segment_dtype
from diloco_protocol.tensors.tensor_pool import mapped
from diloco_worker.model.flat_state import FlatState, held
from diloco_worker.model.placement import HOST

# Elements of a piece: on the host two fp32 pieces fit into a core's second-level cache; on an
# accelerator (16 MiB) the kernels are long enough to hide their launch.
PIECE_ELEMENTS = 1 << 17
ACCELERATOR_PIECE_ELEMENTS = 1 << 22
# Wire dtypes that reach as far as fp32.
_WIDE = (torch.float32, torch.bfloat16)
# Returns an uninitialised vector on the host.
Room = Callable[[int, torch.dtype], Tensor]


@dataclass(frozen=True)
class Delta:
    """A frozen pseudo-gradient in wire form."""

    wire: FlatState  # global minus local; of buffers and integers the local values
    norm: float  # Euclidean length of the parameters' part, before rounding to the wire dtype
    bad: str | None  # a tensor that has NaN or infinity after encoding


@dataclass(eq=False, repr=False)
class Encoding:
    """A fragment that is encoded tensor by tensor."""

    layout: FragmentLayout
    dtype: str  # the wire dtype
    base: FlatState | None = None  # minuend; None: tensors are encoded as they are
    room: InitVar[Room] = mapped
    device: torch.device = HOST  # of the computation
    squares: float = 0.0  # sum over the parameters, before rounding to the wire dtype
    bad: str | None = None  # the first place with NaN or infinity after encoding
    wire: dict[Segment, Tensor] = field(init=False)

    def __post_init__(self, room: Room) -> None:
        self.wire = {}
        for segment, length in self.layout.lengths.items():
            dtype = segment_dtype(segment, self.dtype)
            stays = segment is Segment.PARAMETERS and is_quantized(self.dtype)
            if length and stays and self.device != HOST:
                self.wire[segment] = torch.empty(length, dtype=dtype, device=self.device)
            elif length:
                self.wire[segment] = room(length, dtype)
        is_on_host = self.device == HOST
        self._elements = PIECE_ELEMENTS if is_on_host else ACCELERATOR_PIECE_ELEMENTS
        longest = min(self._elements, self.layout.lengths[Segment.PARAMETERS])
        self._piece = torch.empty(longest, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def add(self, place: Place, values: Tensor) -> None:
        """Encode one tensor. Buffers and integers are always taken as values."""
        given = values.detach().reshape(-1)
        if place.start == place.stop:
            return
        if place.segment is not Segment.PARAMETERS:
            stored = self.wire[place.segment][place.start : place.stop].copy_(given)
            if not is_finite(stored):
                self.bad = self.bad or place.entry.name
            return
        for start in range(place.start, place.stop, self._elements):
            stop = min(start + self._elements, place.stop)
            self._add_piece(place, start, stop, given[start - place.start : stop - place.start])

    def _add_piece(self, place: Place, start: int, stop: int, local: Tensor) -> None:
        encoded = self.wire[place.segment][start:stop]
        is_exact = encoded.dtype is torch.float32 and encoded.device == self.device
        values = encoded if is_exact else self._piece[: stop - start]
        if local.dtype is not torch.float32 or local.device != self.device or self.base is None:
            local = values.copy_(local)
        if self.base is not None:
            begun = self.base.vectors[place.segment][start:stop].to(self.device)
            torch.sub(held(begun, place.entry), local, out=values)
        if is_exact:
            rounded = encoded
        elif encoded.device == self.device:
            rounded = encoded.copy_(values)
        else:
            rounded = values.to(encoded.dtype)
            encoded.copy_(rounded)
        # Finite squares have finite roots, far below the range of bf16.
        square = float(torch.dot(values, values))
        is_fine = math.isfinite(square) and encoded.dtype in _WIDE
        if not is_fine and not is_finite(rounded):
            self.bad = self.bad or place.entry.name
            return
        if not math.isfinite(square):  # large elements: fp64 has room for their squares
            square = float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
        self.squares += square

    @property
    def delta(self) -> Delta:
        """The result."""
        state = FlatState(self.layout, self.wire, self.dtype)
        return Delta(state, math.sqrt(self.squares), self.bad)


def encode(
    layout: FragmentLayout,
    tensors: Mapping[str, Tensor],
    dtype: str,
    base: FlatState | None = None,
    room: Room = mapped,
    *,
    device: torch.device = HOST,
) -> Delta:
    """Encode tensors in wire form: `base` minus them, or they themselves."""
    encoding = Encoding(layout, dtype, base, room, device)
    for place in layout.places:
        encoding.add(place, tensors[place.entry.name])
    return encoding.delta
