"""The outer steps of one chunk, as a function of its state and gradients.

Inputs are never modified, so chunks may be advanced in parallel, and a step with an unusable result has
no effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diloco_broker.config.schedule import OuterSchedule
from diloco_broker.tensors.aggregate import Gradient
from diloco_broker.tensors.blend import Blend
from diloco_broker.tensors.memory import empty
from diloco_broker.tensors.outer import chunked
from diloco_broker.tensors.replica import followed
from diloco_protocol import kernels
from diloco_protocol.chunks import ChunkSpan, Segment
from diloco_protocol.dtypes import whole_dtype
from diloco_protocol.tensors.codecs import encode_chunk, has_nan, is_finite, segment_dtype


def in_wire_form(
    span: ChunkSpan, values: Tensor, reply: str, *, frozen: bool = False
) -> Tensor | None:
    """A full chunk in the dtype of replies; None if a value is not finite there.

    Without a conversion it is the tensor itself, shared by all readers without a copy. A `frozen` chunk
    may contain infinities (a causal mask), but not NaN.
    """
    dtype = segment_dtype(span.segment, whole_dtype(reply))
    sent = values if values.dtype is dtype else empty(span.elements, dtype).copy_(values)
    if frozen:
        return None if has_nan(sent) else sent
    return sent if is_finite(sent) else None


@dataclass(frozen=True, eq=False)
class Kept:
    """The state of one chunk; its tensors are immutable."""

    master: Tensor  # fp32 or int64, 1-D
    state: chunked.State
    replica: Tensor | None = None  # the workers' replica, if replies are quantized


@dataclass(frozen=True, eq=False)
class Advanced:
    """A chunk after its steps: its new state, its wire form, and whether a gradient was unusable."""

    kept: Kept
    wire: Any
    overflow: bool


@dataclass(frozen=True, eq=False)
class Advance:
    """Advances one chunk.

    `outer` steps parameters, with learning rate and momentum from `schedule`. `reply`, `share` and
    `is_round` are as in `Parameters`.
    """

    span: ChunkSpan
    outer: chunked.ChunkOuter | None  # None if the optimizer steps whole tensors
    schedule: OuterSchedule
    reply: str
    share: float
    is_round: bool

    def of(self, kept: Kept, gradients: Iterable[Gradient | Blend | None], count: int) -> Advanced:
        """Take one step for each gradient; `count` gradients precede the first.

        For a missing gradient the chunk is unchanged, except that a due buffer is applied and a due
        restart resets the momentum. The same
        holds if the result of a step is not finite: otherwise one enormous value would make parameters
        and momentum infinite permanently.
        """
        made: Tensor | None = None
        overflow = False
        for turn, gradient in enumerate(gradients, start=count):
            if self.schedule.restarts(turn):
                kept = replace(kept, state=chunked.without(kept.state, chunked.MOMENTUM))
            stepped = None if gradient is None else self._step(kept, gradient, turn)
            if stepped is None:
                overflow |= gradient is not None
                stepped, is_held = self._empty_buffer(kept, turn)
                overflow |= not is_held
            kept, made = stepped
        return self.sent(kept, made, overflow=overflow)

    def sent(self, kept: Kept, made: Tensor | None = None, *, overflow: bool) -> Advanced:
        """Encode the new state; `made` is its wire form, if computed already."""
        if kept.replica is not None:
            replica, coded = followed(self.reply, kept.replica, kept.master)
            return Advanced(replace(kept, replica=replica), coded, overflow)
        if made is None:
            made = in_wire_form(self.span, kept.master, self.reply)
            assert made is not None, "a chunk that could not be sent was stored"
        return Advanced(kept, encode_chunk(self.span, made, whole_dtype(self.reply)), overflow)

    def _step(
        self, kept: Kept, gradient: Gradient | Blend, count: int
    ) -> tuple[Kept, Tensor | None] | None:
        """The state after a gradient, and its wire form; None if the result is not finite."""
        master, state = kept.master, kept.state
        if isinstance(gradient, Blend):
            updated = gradient.onto(master, self.share)
        elif self.span.segment is Segment.INTEGERS:
            largest = gradient.whole()
            updated = largest.clone() if self.is_round else torch.maximum(master, largest)
        else:
            assert self.outer is not None
            outer, fast = self.outer.at(self.schedule, count), kernels.ready()
            if fast is not None and isinstance(outer, chunked.Nesterov | chunked.DelayedNesterov):
                dtype = segment_dtype(self.span.segment, whole_dtype(self.reply))
                (updated, state), made = outer.step_by_kernel(
                    fast, master, gradient.terms(), state, count=count, wire=dtype
                )
                return None if made is None else (Kept(updated, state, kept.replica), made)
            updated, state = outer.step(master, gradient.whole(), state, count)
        # An infinite momentum makes the parameters infinite at once; only these must be checked.
        unseen = [state[name] for name in (chunked.DELAYED, chunked.SQUARES) if name in state]
        if not all(map(is_finite, unseen)):
            return None
        made = in_wire_form(self.span, updated, self.reply)
        return None if made is None else (Kept(updated, state, kept.replica), made)

    def _empty_buffer(self, kept: Kept, count: int) -> tuple[tuple[Kept, Tensor | None], bool]:
        """At a boundary without a usable gradient, apply a nonempty buffer with a gradient of 0.

        The count increases in any case: gradients left in the buffer would be divided by N together with
        the next N gradients. A buffer that overflows is discarded, and the second result is False.
        """
        if chunked.DELAYED not in kept.state or self.outer is None:
            return (kept, None), True
        if (count + 1) % self.outer.size:
            return (kept, None), True
        nothing = Gradient.of(torch.zeros(self.span.elements))
        stepped = self._step(kept, nothing, count)
        if stepped is not None:
            return stepped, True
        return (replace(kept, state=chunked.without(kept.state, chunked.DELAYED)), None), False
