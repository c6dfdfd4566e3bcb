"""Changes the model so that the change may be interrupted anywhere, and resumed.

A merge reads what it overwrites: done twice it would count steps twice, done by half it leaves an
inconsistent model. So each tensor is computed beside the model, copied in at once, and recorded. An
interrupted change (out of memory, Ctrl-C) resumes later with the remaining tensors; they get the values
that they would have had, and the steps made since stay on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco_protocol import Segment
from diloco_protocol.chunks import Place
from diloco_worker.model.flat_state import FlatState


@dataclass
class Change:
    """A change of a fragment in the model.

    Without an origin local <- alpha local + (1 - alpha) new, the merge of Streaming DiLoCo (Douillard
    et al. 2025, arXiv 2501.18512). With one: local <- alpha origin + (1 - alpha) new + (local -
    origin). Parameters are computed in fp32 (fp64 for fp64 tensors), then rounded to the tensor's
    dtype. Float buffers stay between the new value and the local one. Integers take the new value; with
    an origin the larger of it and new + (local - origin), as a counter would.
    """

    new: FlatState
    alpha: float = 0.0  # weight of the local values; 0: they are overwritten
    # An earlier state of the model; steps made since are kept completely, on top of its merge.
    origin: FlatState | None = None
    is_void: bool = False  # discard local values, and steps made while it is interrupted
    _done: set[str] = field(default_factory=set)
    _next: tuple[str, Tensor] | None = None  # computed; copied in or not
    # The values, on the host, of tensors that remained at the first interruption.
    _left: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def carry_out(self, live: Mapping[str, Tensor]) -> None:
        """Change the remaining tensors of the model, given by name. Afterwards the host memory of `new`
        and `origin` may be reused.
        """
        try:
            for place in self.new.layout.places:
                if place.entry.name not in self._done:
                    self._change(place, live[place.entry.name])
            wait_for_copies(tensor.device for tensor in live.values())
        except BaseException:
            self._break_off(live)
            raise

    @property
    def reads(self) -> bool:
        """Whether the result depends on the local values."""
        return self.alpha != 0 or self.origin is not None

    def _change(self, place: Place, tensor: Tensor) -> None:
        name, then = place.entry.name, self._left.get(place.entry.name)
        value = self.merged(place, tensor.detach() if then is None else then)
        if then is not None:
            value = _with_steps(place, value, then, tensor.detach())
        self._next = (name, value)
        _copy_in(tensor, value)
        self._done.add(name)
        self._next = None

    @torch.no_grad()
    def merged(self, place: Place, local: Tensor) -> Tensor:
        """The result for a local value, on its device. In fp32 (blending fp64 tensors, in fp64)."""
        fresh, origin = self.new.of(place), self.origin
        if place.segment is Segment.INTEGERS:
            if origin is None:
                return fresh
            # The larger of both, as a counter would.
            moved = local.to(fresh.dtype, copy=True)
            fresh = _beside(fresh, moved)
            moved = moved.sub_(_beside(origin.of(place), moved)).add_(fresh)
            return torch.maximum(moved, fresh)
        if self.alpha == 0:
            if origin is None:
                return fresh
            local = local.to(fresh.dtype)
            moved = local - _beside(origin.held(place), local)
            moved += _beside(self.new.held(place), moved)
            fresh = _beside(fresh, moved)
            return moved if place.segment is Segment.PARAMETERS else _between(moved, local, fresh)
        if self.alpha == 1:
            return local
        local = local.to(torch.promote_types(local.dtype, torch.float32))
        fresh = _beside(fresh, local)
        if origin is None:
            moved = local.lerp(fresh, 1 - self.alpha)  # of equal values, exactly that value
        else:
            moved = local.add(fresh - _beside(origin.held(place), local), alpha=1 - self.alpha)
        return moved if place.segment is Segment.PARAMETERS else _between(moved, local, fresh)

    def _break_off(self, live: Mapping[str, Tensor]) -> None:
        """Record the state of an interrupted change. Needs no memory on an accelerator."""
        if self._next is not None:
            name, value = self._next
            now = live[name].detach().cpu()
            if torch.equal(now, value.detach().cpu().to(now.dtype)):
                self._done.add(name)
            self._next = None
        if self.is_void:
            return
        for place in self.new.layout.places:
            name = place.entry.name
            if name not in self._done and name not in self._left:
                self._left[name] = live[name].detach().to("cpu", copy=True)


def _with_steps(place: Place, value: Tensor, then: Tensor, now: Tensor) -> Tensor:
    """The value that a tensor should have had `then`, with the steps made since."""
    now = now.cpu()
    if torch.equal(now, then):
        return value
    wide = torch.promote_types(now.dtype, value.dtype)
    held, now = value.cpu().to(now.dtype).to(wide), now.to(wide)
    moved = held + (now - then.to(wide))
    return _between(moved, held, now) if place.segment is Segment.BUFFERS else moved


def _between(values: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Clamp the values between one and the other; NaN (from inf - inf) becomes the other."""
    values = torch.where(values.isnan(), other, values)
    return torch.clamp(values, torch.minimum(one, other), torch.maximum(one, other))


def _beside(values: Tensor, other: Tensor) -> Tensor:
    """Values on the device of another tensor, in its dtype."""
    return values.to(other.device, other.dtype, non_blocking=other.is_cuda)


def _copy_in(tensor: Tensor, values: Tensor) -> None:
    # Only the queues of CUDA are waited for.
    tensor.copy_(values.to(tensor.device, non_blocking=tensor.is_cuda))


def wait_for_copies(devices: Iterable[torch.device]) -> None:
    """Wait for the queues of these devices."""
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
