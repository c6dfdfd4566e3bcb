"""The tensors of a model by name: capturing them, their delta in wire form, and putting values back.

With parameters on a CUDA device the vectors lie in pinned memory, unless `placement` says otherwise:
copies are queued on the current stream of the calling thread, behind the training kernels, and waited
for before the host looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from diloco_protocol import Manifest, Segment, TensorEntry, UsageError
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.tensors.codecs import is_finite, segment_dtype
from diloco_protocol.tensors.tensor_pool import TensorPool, mapped
from diloco_worker.model.flat_state import FlatState, held
from diloco_worker.model.merging import Change, wait_for_copies
from diloco_worker.model.model_manifest import (
    dtype_name,
    live_tensors,
    manifest_of,
    require_sound,
    unwrapped,
)
from diloco_worker.model.model_watch import ModelWatch

# Elements handled at a time: two fp32 pieces of this size stay in a core's second-level cache.
PIECE_ELEMENTS = 1 << 17
# Wire dtypes that reach as far as fp32.
_WIDE = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Delta:
    """A frozen pseudo-gradient in wire form."""

    wire: FlatState  # global minus local; of buffers and integers the local values
    norm: float  # Euclidean length of the parameters' part, before rounding to the wire dtype
    bad: str | None  # a tensor that has NaN or infinity after encoding


@dataclass(eq=False, repr=False)
class ModelTensors:
    """The tensors of a model, by the manifest's names."""

    manifest: Manifest
    lookup: Callable[[], Mapping[str, Tensor]]  # asked each time: a module may replace a buffer
    watch: ModelWatch | None = None  # notices that the model is not that of the manifest any more
    may_pin: bool = True  # memory of the host that a CUDA device is copied to
    _buffers: TensorPool = field(default_factory=TensorPool)

    @classmethod
    def of_module(cls, model: nn.Module | Sequence[nn.Module]) -> ModelTensors:
        """The tensors of a module's `state_dict`; raises UsageError when they cannot be exchanged."""
        module = unwrapped(model)
        return cls(manifest_of(module), lambda: live_tensors(module), ModelWatch(module))

    @classmethod
    def of_state(cls, manifest: Manifest, state: Mapping[str, Tensor]) -> ModelTensors:
        """Tensors in a dict, for a model that is no nn.Module."""
        require_sound(manifest)
        tensors = cls(manifest, lambda: state)
        tensors._checked(tuple(manifest.entries))
        return tensors

    def share_of(self, layout: FragmentLayout) -> FragmentLayout:
        """What of a fragment this process has: all of it."""
        return layout

    @property
    def devices(self) -> list[torch.device]:
        return [tensor.device for tensor in self.lookup().values()]

    @property
    def pins(self) -> bool:
        """Whether memory of the host for these tensors is pinned."""
        return self.may_pin and _on_cuda(self.lookup().values())

    def live(self) -> Iterator[tuple[TensorEntry, Tensor]]:
        """Each entry of the manifest with its tensor as it is now; raises UsageError as `_checked`."""
        found = self._checked(self.manifest.entries)
        return ((entry, found[entry.name].detach()) for entry in self.manifest.entries)

    def capture(self, layout: FragmentLayout) -> FlatState:
        """Copy a fragment's values to the host; raises UsageError as `_checked` does."""
        live = self._live(layout)
        state = FlatState.empty(layout, pinned=self.may_pin and _on_cuda(live.values()))
        for place in state.layout.places:
            tensor, target = live[place.entry.name].detach(), state.of(place)
            # Converted on its device, so that the copy to the host can be queued.
            source = tensor.to(target.dtype) if tensor.is_cuda else tensor
            target.copy_(source, non_blocking=tensor.is_cuda)
        wait_for_copies(live)
        return state

    @torch.no_grad()
    def distance(self, base: FlatState) -> float:
        """Euclidean length of what separates the model's parameters from these."""
        live = self._live(base.layout)
        squares = 0.0
        for place in base.layout.places:
            if place.segment is Segment.PARAMETERS:
                apart = live[place.entry.name].detach().to("cpu", torch.float32, copy=True)
                squares += float(torch.linalg.vector_norm(apart.sub_(base.of(place)))) ** 2
        return math.sqrt(squares)

    def delta(self, base: FlatState, dtype_name: str, captured: FlatState | None = None) -> Delta:
        """Global minus local of a fragment, encoded into memory that no other delta is in.

        Training started from `base`, rounded to the model's dtypes. The local values may be `captured`
        already; else the model is read. Raises UsageError as `_checked` does.
        """
        if base.device.type != "cpu":
            there = self._live(base.layout) if captured is None else captured.by_name()
            return encode_there(base, there, dtype_name, self._buffers.take)
        if captured is None and _on_cuda(self._live(base.layout).values()):
            # One queue of copies and one wait, instead of a wait for each piece.
            captured = self.capture(base.layout)
        local = self._live(base.layout) if captured is None else captured.by_name()
        return encode(base.layout, local, dtype_name, base, self._buffers.take)

    def bring_in(self, change: Change) -> None:
        """Change the model's own tensors, so that the optimizer's references stay valid.

        When this returns the host memory of the change may be used again. What it raises breaks the
        change off: called again, it goes on with the tensors that are left.
        """
        change.carry_out(self._live(change.new.layout))

    def put(self, state: FlatState) -> None:
        self.bring_in(Change(state))

    def _live(self, layout: FragmentLayout) -> dict[str, Tensor]:
        return self._checked(tuple(place.entry for place in layout.places))

    def _checked(self, entries: tuple[TensorEntry, ...]) -> dict[str, Tensor]:
        """By name; raises UsageError when a tensor is not what the manifest says any more."""
        tensors = self.lookup()
        found = {}
        for entry in entries:
            tensor = tensors.get(entry.name)
            if tensor is None:
                raise UsageError(f"The model has no tensor {entry.name!r} (any more).")
            if tuple(tensor.shape) != entry.shape or dtype_name(tensor) != entry.dtype:
                raise UsageError(
                    f"{entry.name} is {dtype_name(tensor)}{list(tensor.shape)}, the run has {entry}; "
                    "the shapes and dtypes of a model must stay as they were when it joined."
                )
            found[entry.name] = tensor
        return found


@torch.no_grad()
def encode(
    layout: FragmentLayout,
    tensors: Mapping[str, Tensor],
    dtype: str,
    base: FlatState | None = None,
    room: Callable[[int, torch.dtype], Tensor] = mapped,
) -> Delta:
    """Lay tensors out in wire form: what a model holds of `base` minus them, or they themselves.

    Buffers and integers are always taken as they are. `room` returns an uninitialised vector.
    """
    wire = {
        segment: room(length, segment_dtype(segment, dtype))
        for segment, length in layout.lengths.items()
        if length
    }
    squares = 0.0
    bad = None
    piece = torch.empty(PIECE_ELEMENTS, dtype=torch.float32)
    for place in layout.places:
        given = tensors[place.entry.name].detach().reshape(-1)
        if place.segment is not Segment.PARAMETERS:
            values = wire[place.segment][place.start : place.stop].copy_(given)
            if not is_finite(values):
                bad = bad or place.entry.name
            continue
        for start in range(place.start, place.stop, PIECE_ELEMENTS):
            stop = min(start + PIECE_ELEMENTS, place.stop)
            values, local = piece[: stop - start], given[start - place.start : stop - place.start]
            if local.dtype is not torch.float32 or base is None:
                local = values.copy_(local)
            if base is not None:
                begun = held(base.vectors[place.segment][start:stop], place.entry)
                torch.sub(begun, local, out=values)
            encoded = wire[place.segment][start:stop]
            encoded.copy_(values)
            # Finite squares have finite roots, far below what bf16 can hold: no second look at them.
            square = float(torch.dot(values, values))
            is_fine = math.isfinite(square) and encoded.dtype in _WIDE
            if not is_fine and not is_finite(encoded):
                bad = bad or place.entry.name
                continue
            if not math.isfinite(square):  # large elements: fp64 has room for their squares
                square = float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
            squares += square
    return Delta(FlatState(layout, wire, dtype), math.sqrt(squares), bad)


@torch.no_grad()
def encode_there(
    base: FlatState,
    tensors: Mapping[str, Tensor],
    dtype: str,
    room: Callable[[int, torch.dtype], Tensor],
) -> Delta:
    """The same as `encode` where the base is: only what travels comes to the host."""
    layout = base.layout
    wire = {
        segment: room(length, segment_dtype(segment, dtype))
        for segment, length in layout.lengths.items()
        if length
    }
    squares, bad = 0.0, None
    for place in layout.places:
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


def _on_cuda(tensors: Iterable[Tensor]) -> bool:
    return any(tensor.is_cuda for tensor in tensors)
