"""Descriptions of a fragment plan for people: parameters, bytes, and steps in the cycle."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_protocol.dtypes import BUFFERS_DTYPE, INTEGERS_DTYPE, SIZES
from diloco_protocol.manifest import Kind, TensorEntry


@dataclass(frozen=True)
class ParameterView:
    """One trainable parameter: its elements, and its bytes in a push (up) and in a reply (down)."""

    name: str
    shape: tuple[int, ...]
    elements: int
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class FragmentView:
    """One fragment of a plan. The bytes of fragment P - 1 include the model's buffers."""

    fragment: int  # its number, 0 .. P - 1
    due: int  # step of a cycle, 1 .. H, after which it is pushed
    parameters: tuple[ParameterView, ...]  # its parameters, in the manifest's order
    elements: int  # of these parameters
    bytes_up: int  # of one push of one worker
    bytes_down: int  # of the reply to one worker


@dataclass(frozen=True)
class PlanView:
    """A plan for one model, as returned by `FragmentPlan.view`."""

    sync_every: int
    wire_dtype: str
    reply_dtype: str
    fragments: tuple[FragmentView, ...]

    @property
    def imbalance(self) -> float:
        """Bytes of the largest push divided by the mean: 1 is perfectly even, P means all in one."""
        sizes = [each.bytes_up for each in self.fragments]
        return max(sizes) * len(sizes) / sum(sizes)


def buffer_bytes(entry: TensorEntry) -> int:
    """Bytes of a buffer in each push and reply of the last fragment; 0 for other tensors."""
    if entry.kind is not Kind.BUFFER:
        return 0
    dtype = BUFFERS_DTYPE if entry.is_floating_point else INTEGERS_DTYPE
    return SIZES[dtype].most(entry.elements)
