"""The tensors of a model by name: capturing them, encoding their delta, and changing them.

With parameters on a CUDA device the vectors lie in pinned memory, unless `placement` says otherwise:
copies are queued on the current stream of the calling thread, and waited for before the host reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diloco_protocol import Kind, Manifest, TensorEntry, UsageError
from diloco_protocol.chunks import FragmentLayout, ModelLayout
from diloco_protocol.tensors.codecs import has_nan, is_finite
from diloco_protocol.tensors.tensor_pool import TensorPool
from diloco_worker.model.encoding import Delta, encode
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.merging import Change, wait_for_copies
from diloco_worker.model.model_manifest import (
    dtype_name,
    live_tensors,
    manifest_of,
    require_sound,
    unwrapped,
)
from diloco_worker.model.model_watch import ModelWatch
from diloco_worker.model.placement import HOST, accelerator_of
from diloco_worker.model.spread.saved_share import part_of
from diloco_worker.model.spread.shares import overlaps, piece_name


@dataclass(eq=False, repr=False)
class ModelTensors:
    """The tensors of a model, by the manifest's names."""

    manifest: Manifest
    lookup: Callable[[], Mapping[str, Tensor]]  # called each time: a module may replace a buffer
    watch: ModelWatch | None = None  # notices changes of the model
    may_pin: bool = True  # memory of the host that a CUDA device is copied to
    _buffers: TensorPool = field(default_factory=TensorPool)
    _pins_wire: bool = False  # whether the last delta was worked out on a CUDA device
    _layout: ModelLayout | None = None

    @classmethod
    def of_module(cls, model: nn.Module | Sequence[nn.Module]) -> ModelTensors:
        """The tensors of a module's `state_dict`; raises UsageError when they cannot be exchanged."""
        module = unwrapped(model)
        return cls(manifest_of(module), lambda: live_tensors(module), ModelWatch(module))

    @classmethod
    def of_state(cls, manifest: Manifest, state: Mapping[str, Tensor]) -> ModelTensors:
        """Tensors in a dict, for a model that is not an nn.Module."""
        require_sound(manifest)
        tensors = cls(manifest, lambda: state)
        tensors._checked(tuple(manifest.entries))
        return tensors

    def look_at(self, take: Callable[[str, Tensor], object]) -> None:
        """Hand over, by name, all trained or averaged values.

        In pieces, one of each tensor for each chunk that it is in, as several processes would; before
        the layout is known, the model's tensors.
        """
        trained = {
            entry.name: tensor for entry, tensor in self.live() if entry.kind is not Kind.FROZEN
        }
        if self._layout is None:
            for name, tensor in trained.items():
                take(name, tensor)
            return
        flat: dict[str, Tensor] = {}
        for part in self._layout.fragments:
            for _, place, low, high in overlaps(part):
                name = place.entry.name
                if name not in flat:
                    flat = {name: trained[name].reshape(-1)}  # one at a time: it may be a copy
                take(piece_name(name, low, high), flat[name][low:high])

    def set_layout(self, layout: ModelLayout) -> None:
        """Set how the model is cut."""
        self._layout = layout

    def begin_view(self) -> None:
        """Other values will be in the model for a while."""

    @property
    def leads(self) -> bool:
        """Whether this process counts what concerns the whole worker."""
        return True

    def part_of(self, saved: Sequence[dict[str, Any]], layout: ModelLayout) -> dict[str, Any]:
        """What this process resumes from, of what one or several processes saved."""
        return part_of(saved, layout)

    def numbers_of(self, layout: FragmentLayout) -> Sequence[int]:
        """Of each chunk that this process has of a fragment, its index in the whole fragment."""
        return range(layout.chunks)

    def room(self, elements: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised vector on the host, in reused memory."""
        if self._pins_wire:
            return torch.empty(elements, dtype=dtype, pin_memory=True)  # torch keeps such memory
        return self._buffers.take(elements, dtype)

    def share_of(self, layout: FragmentLayout) -> FragmentLayout:
        """What this process has of a fragment: all of it."""
        return layout

    @property
    def devices(self) -> list[torch.device]:
        return [tensor.device for tensor in self.lookup().values()]

    @property
    def pins(self) -> bool:
        """Whether host memory for these tensors is pinned."""
        return self.may_pin and any(device.type == "cuda" for device in self.devices)

    def live(self) -> Iterator[tuple[TensorEntry, Tensor]]:
        """Each entry of the manifest with its current tensor; raises UsageError as `_checked`."""
        found = self._checked(self.manifest.entries)
        return ((entry, found[entry.name].detach()) for entry in self.manifest.entries)

    def capture(self, layout: FragmentLayout) -> FlatState:
        """Copy a fragment's values to the host; raises UsageError as `_checked`."""
        live = self._live(layout)
        is_on_cuda = any(tensor.is_cuda for tensor in live.values())
        state = FlatState.empty(layout, pinned=self.may_pin and is_on_cuda)
        for place in state.layout.places:
            tensor, target = live[place.entry.name].detach(), state.of(place)
            # Converted on its device, so that the copy to the host can be queued.
            source = tensor.to(target.dtype) if tensor.is_cuda else tensor
            target.copy_(source, non_blocking=tensor.is_cuda)
        wait_for_copies(tensor.device for tensor in live.values())
        return state

    def delta(self, base: FlatState, dtype_name: str, captured: FlatState | None = None) -> Delta:
        """Global minus local of a fragment, encoded into memory that no other delta is in.

        Training started from `base`, rounded to the model's dtypes. `captured`: the local values where
        they were captured already. Raises UsageError as `_checked`.
        """
        device = self._device_for(base)
        is_read = device == HOST and captured is not None
        local = captured.by_name() if captured and is_read else self._live(base.layout)
        return encode(base.layout, local, dtype_name, base, self.room, device=device)

    def _device_for(self, base: FlatState) -> torch.device:
        """Where a delta from this base is computed; sets what `room` returns."""
        device = accelerator_of(self.devices) if base.device == HOST else base.device
        self._pins_wire = self.may_pin and device.type == "cuda"
        return device

    def bring_in(self, change: Change) -> None:
        """Change the model's own tensors, so that the optimizer's references stay valid.

        Afterwards the host memory of the change may be reused. An exception interrupts the change:
        called again, it resumes with the remaining tensors.
        """
        change.carry_out(self._live(change.new.layout))

    def check_values(self) -> None:
        """Raise UsageError for values that no run can start with: NaN, infinities in values trained or
        averaged, fp64 values beyond the range of fp32.
        """
        for entry, tensor in self.live():
            is_wide = tensor.dtype is torch.float64
            if not entry.is_floating_point or is_finite(tensor.float() if is_wide else tensor):
                continue
            if has_nan(tensor):
                raise UsageError(
                    f"{entry.name} holds NaN, so no run can start with it; fix the initialisation of "
                    "the model, or load another checkpoint."
                )
            if is_finite(tensor):
                raise UsageError(
                    f"{entry.name} is {entry.dtype} and holds values beyond the range of fp32, in which "
                    "models travel; scale it down."
                )
            if entry.kind is Kind.TRAINABLE:
                raise UsageError(
                    f"{entry.name} is trained and holds infinities; fix the initialisation of the "
                    "model, or load another checkpoint."
                )
            if entry.kind is Kind.BUFFER:
                raise UsageError(
                    f"{entry.name} is a buffer that is averaged, and holds infinities; a constant must "
                    "hold them when the DiLoCoWorker is made, or be frozen in the client's manifest."
                )

    def put(self, state: FlatState) -> None:
        self.bring_in(Change(state))

    def _live(self, layout: FragmentLayout) -> dict[str, Tensor]:
        return self._checked(tuple(place.entry for place in layout.places))

    def _checked(self, entries: tuple[TensorEntry, ...]) -> dict[str, Tensor]:
        """By name; raises UsageError when a tensor no longer matches the manifest."""
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
