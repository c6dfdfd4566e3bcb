"""What a fragment plan means: which parameters, how many bytes, and when in the cycle. For people."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_protocol.dtypes import BUFFERS_DTYPE, INTEGERS_DTYPE, SIZES
from diloco_protocol.manifest import Kind, TensorEntry


@dataclass(frozen=True)
class ParameterView:
    """One trainable parameter: elements, and bytes of it in a push (up) and in a reply (down)."""

    name: str
    shape: tuple[int, ...]
    elements: int
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class FragmentView:
    """One fragment of a plan. Bytes hold the model's buffers in fragment P - 1."""

    fragment: int  # its number, 0 .. P - 1
    due: int  # the step of a cycle of H, 1 .. H, after which it is pushed; and so every H steps
    parameters: tuple[ParameterView, ...]  # those in it, in the manifest's order
    elements: int  # of these parameters
    bytes_up: int  # of one push of it by one worker
    bytes_down: int  # of the reply to one worker


@dataclass(frozen=True)
class PlanView:
    """A plan for one model, as `FragmentPlan.view` gives it."""

    sync_every: int
    wire_dtype: str
    reply_dtype: str
    fragments: tuple[FragmentView, ...]

    @property
    def imbalance(self) -> float:
        """Bytes of the largest push over their mean: 1 is perfectly even, P is all in one."""
        sizes = [each.bytes_up for each in self.fragments]
        return max(sizes) * len(sizes) / sum(sizes)


def buffer_bytes(entry: TensorEntry) -> int:
    """Bytes that a buffer takes in each push and reply of the last fragment; 0 for what is none."""
    if entry.kind is not Kind.BUFFER:
        return 0
    dtype = BUFFERS_DTYPE if entry.is_floating_point else INTEGERS_DTYPE
    return SIZES[dtype].most(entry.elements)
