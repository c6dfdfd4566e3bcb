"""The tensors of the run: master parameters, momentum, accumulators, and the chunks in wire form.

Everything here works on one chunk at a time and is called by the loop in small slices. A chunk that has
been handed out is never written again: a step makes a new tensor, and the old one is freed when the
last reader has let go of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diloco_broker.outer import Nesterov
from diloco_broker.reduce import StreamingMean
from diloco_protocol.chunks import ChunkSpan, FragmentLayout, ModelLayout, Segment
from diloco_protocol.codecs import as_bytes, from_bytes, is_finite, segment_dtype, wire_dtype


class Parameters:
    """Master copies of every chunk, and what makes new ones.

    Args:
        layout: how the model is cut.
        outer: the outer optimizer, shared by all fragments; its state is kept for each chunk.
        wire: name of the dtype of pseudo-gradients on their way up.
        reply: name of the dtype of parameters on their way down.
        initial: tensors of the model file by name, or None.
    """

    def __init__(
        self,
        layout: ModelLayout,
        outer: Nesterov,
        wire: str,
        reply: str,
        initial: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.outer = outer
        self.layout = layout
        self._layouts = layout.all
        self._reply = wire_dtype(reply)
        self._initial = initial
        self._means = [StreamingMean(part, wire_dtype(wire)) for part in layout.fragments]
        self._masters: list[list[Tensor | None]] = [[None] * p.chunks for p in layout.all]
        self._momenta: list[list[Tensor | None]] = [[None] * p.chunks for p in layout.all]

    def place(self, fragment: int, index: int, payload: Any = None) -> Any | None:
        """Store a chunk of the first version: from a donation, or the model file (payload None).

        Returns the chunk in wire form, or None when it is not finite there.
        """
        span = self._layouts[fragment].spans[index]
        if payload is None:
            values = self._from_file(self._layouts[fragment], span)
        else:
            values = from_bytes(payload, segment_dtype(span.segment, torch.float32)).clone()
        reply = self._in_wire_form(span, values)
        if reply is None:
            return None
        self._masters[fragment][index] = values
        return as_bytes(reply)

    def forget_initial(self) -> None:
        """Let go of the model file's tensors: every chunk has been placed."""
        self._initial = None

    def fold(self, fragment: int, index: int, payload: Any, weight: float) -> bool:
        """Add a chunk of a push to the round's mean; False when it is not finite."""
        return self._means[fragment].fold(index, payload, weight)

    def step(self, fragment: int, index: int, weight: float) -> tuple[Any, bool]:
        """The outer step of one chunk.

        Returns:
            The new chunk in wire form, and whether the mean overflowed (the chunk then kept its
            value, as it does when nothing reached it).
        """
        span = self._layouts[fragment].spans[index]
        master = self._masters[fragment][index]
        assert master is not None
        mean = self._means[fragment].take(index, weight)
        reply = None if mean is None else self._apply(fragment, span, master, mean)
        if reply is not None:
            return as_bytes(reply), False
        kept = self._in_wire_form(span, master)
        assert kept is not None, "a chunk that could not be sent was stored"
        return as_bytes(kept), mean is not None

    def _apply(self, fragment: int, span: ChunkSpan, master: Tensor, mean: Tensor) -> Tensor | None:
        """Store what a mean makes of a chunk; None, and nothing stored, when it is not finite.

        One finite but enormous value would make parameters and momentum infinite for good.
        """
        momentum = self._momenta[fragment][span.index]
        match span.segment:
            case Segment.INTEGERS:
                updated = mean.clone()
            case Segment.BUFFERS:
                updated = master - mean
            case Segment.PARAMETERS:
                updated, momentum = self.outer.step(master, mean, momentum)
        reply = self._in_wire_form(span, updated)
        if reply is not None:
            self._masters[fragment][span.index] = updated
            self._momenta[fragment][span.index] = momentum
        return reply

    def _in_wire_form(self, span: ChunkSpan, values: Tensor) -> Tensor | None:
        """The chunk as it is sent; None when it is not finite in that dtype.

        Without a conversion this is the tensor itself: no copy, shared by all readers.
        """
        reply = values.to(segment_dtype(span.segment, self._reply))
        return reply if span.segment is Segment.INTEGERS or is_finite(reply) else None

    def _from_file(self, layout: FragmentLayout, span: ChunkSpan) -> Tensor:
        assert self._initial is not None
        values = torch.empty(span.elements, dtype=segment_dtype(span.segment, torch.float32))
        for place in layout.places:
            start, stop = max(place.start, span.start), min(place.stop, span.stop)
            if place.segment is span.segment and start < stop:
                names = (place.entry.name, *place.entry.aliases)
                tensor = next(self._initial[name] for name in names if name in self._initial)
                part = tensor.reshape(-1)[start - place.start : stop - place.start]
                values[start - span.start : stop - span.start].copy_(part)
        return values
