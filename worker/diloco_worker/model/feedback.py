"""Error feedback: what sending in few bits has left out goes with what is sent next.

A chunk in few bits is not quite what was to be sent. With e, the *residual* of the fragment, a = e +
delta and C(a) is sent; once it has counted, e is a - D(C(a)) (Seide et al. 2014; Karimireddy et al.
2019, arXiv 1901.09847). So all that was learnt is either counted or in e, and nothing is lost but for
the rounding of fp32. A push that does not count leaves e as it was; of one that counts in part each
chunk is settled by itself, once a version says which.

The residual is an fp32 copy of the parameters, kept chunk by chunk; each is replaced by a new one and
never written to, so that whoever sends may read it. It is on the device of the delta: with a model on an
accelerator the codes are made there as soon as the delta is frozen, and only they come to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco_protocol import Segment
from diloco_protocol.chunks import ChunkSpan, FragmentLayout
from diloco_protocol.tensors.codecs import (
    add_code,
    decode_chunk,
    encode_chunk,
    encode_sum,
    is_finite,
)
from diloco_protocol.tensors.tensor_pool import mapped
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.placement import HOST

# Returns an uninitialised vector on the host.
Room = Callable[[int, torch.dtype], Tensor]
ByChunk = Mapping[int, Tensor]  # by index in the layout, of chunks of parameters


@dataclass(frozen=True)
class InFewBits(FlatState):
    """A frozen delta that goes out with the residual, in a codec of few bits.

    Its vectors are the delta alone, in fp32: the model was at base minus it. On the host a chunk is
    encoded when it is sent first, in whichever thread; its bytes stay: what is sent again is the same.
    """

    residual: dict[int, Tensor] = field(default_factory=dict)  # zeros where a chunk is missing
    codes: dict[int, memoryview] = field(default_factory=dict)
    room: Room = mapped
    _ahead: dict[int, Future[memoryview]] = field(default_factory=dict)

    def encode_ahead(self, threads: Executor) -> None:
        """Begin to encode all chunks of parameters in these threads; `chunk` waits for its own."""
        for span in self.layout.spans:
            if span.segment is Segment.PARAMETERS and span.index not in self.codes:
                self._ahead[span.index] = threads.submit(self._encoded, span)

    def encode_here(self, *, in_child: bool = False) -> None:
        """Stop encoding ahead: `chunk` encodes what is missing.

        In a forked child nothing is cancelled: the threads do not exist there, and the lock of a future
        may have been held when the process forked.
        """
        ahead = list(self._ahead.values())
        self._ahead.clear()
        if not in_child:
            for each in ahead:
                each.cancel()

    def chunk(self, index: int) -> memoryview:
        """The bytes of one chunk."""
        if self.layout.spans[index].segment is not Segment.PARAMETERS:
            return super().chunk(index)
        code = self.codes.get(index)
        if code is None:
            ahead = self._ahead.pop(index, None)
            try:
                code = None if ahead is None else ahead.result()
            except CancelledError:  # the worker is closing
                code = None
            if code is None:
                code = self._encoded(self.layout.spans[index])
            self.codes[index] = code
        return code

    def _encoded(self, span: ChunkSpan) -> memoryview:
        residual, delta, summed = self.residual.get(span.index), self._delta(span), None
        if residual is not None:
            summed = encode_sum(self.dtype, delta, residual, self._bytes)
        # Beyond the range of fp32 the residual is given up; what was learnt now goes on.
        return summed.payload if summed else encode_chunk(span, delta, self.dtype, self._bytes)

    @torch.no_grad()
    def left_out(self, span: ChunkSpan, room: Room) -> Tensor:
        """What a chunk of parameters leaves out: the residual once it has counted."""
        code, delta, residual = (
            self.chunk(span.index),
            self._delta(span),
            self.residual.get(span.index),
        )
        if delta.device == HOST:
            made = room(span.elements, delta.dtype)
            found = add_code(self.dtype, code, delta, made, other=residual, sign=-1.0)
            if found is None and residual is not None:
                add_code(self.dtype, code, delta, made, sign=-1.0)
            return made
        total = delta if residual is None else residual.to(delta.device) + delta
        total = total if is_finite(total) else delta
        made = torch.empty_like(total)
        return torch.sub(total, decode_chunk(span, code, self.dtype, made), out=made)

    def _bytes(self, count: int) -> Tensor:
        return self.room(count, torch.uint8)

    def _delta(self, span: ChunkSpan) -> Tensor:
        return self.vectors[span.segment][span.start : span.stop]


@dataclass(eq=False, repr=False)
class Feedback:
    """The residual of a fragment. Belongs to the training thread; see the head of this module."""

    layout: FragmentLayout
    room: Room
    # False until something was sent in few bits: then there is nothing to keep or to save.
    is_used: bool = False
    # By push that was dropped, what the residual gains by each of its chunks that counts all the same.
    dropped: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    # Each with what it was made for last, which is so done once, although it may be called again.
    _chunks: dict[int, tuple[Tensor, object]] = field(default_factory=dict)

    @property
    def spans(self) -> Iterator[ChunkSpan]:
        """The chunks that have a residual."""
        return (span for span in self.layout.spans if span.segment is Segment.PARAMETERS)

    @property
    def chunks(self) -> dict[int, Tensor]:
        """The residual by chunk; zeros where one is missing."""
        return {index: values for index, (values, _) in self._chunks.items()}

    def joined(self, delta: FlatState) -> InFewBits:
        """A delta that was frozen now, to go out with the residual."""
        self.is_used = True
        made = InFewBits(delta.layout, delta.vectors, delta.dtype, self.chunks, room=self.room)
        if any(vector.device != HOST for vector in delta.vectors.values()):
            for span in self.spans:
                made.chunk(span.index)  # no other thread has to use the accelerator
        return made

    def settle(
        self,
        why: object,
        counted: tuple[FlatState, Collection[int]] | None,
        known: Mapping[int, Collection[int]],
    ) -> None:
        """A version has come into the model. For the same `why` it may be called again.

        Args:
            counted: the delta that it counts, and the chunks of it that it contains, by index in the
                layout (an earlier push may have contributed the others); None where none was under way.
            known: of pushes that were dropped before, the chunks that count all the same, by index in
                the layout; such a push is settled with it.
        """
        delta, own = (None, ()) if counted is None else counted
        in_flight = delta if isinstance(delta, InFewBits) else None
        for span in self.spans:
            at = span.index
            before, last = self._chunks.get(at, (None, None))
            if last is why:
                continue
            open_ = self.dropped.keys() & known.keys()
            gains = [
                self.dropped[push][at]
                for push in open_
                if at in known[push] and at in self.dropped[push]
            ]
            sent = in_flight if at in own else None
            if sent is None and not gains:
                continue
            made = before if sent is None else sent.left_out(span, self.room)
            for gain in gains:
                made = gain if made is None else made + gain.to(made.device)
            assert made is not None
            self._chunks[at] = (made, why)
            if sent is not None:
                sent.residual.pop(at, None)  # its memory can be used for the next chunk
        for push in known:
            self.dropped.pop(push, None)

    def drop(self, push_id: int, delta: FlatState, may_count: Collection[int]) -> None:
        """A push was refused; a version will tell which of these chunks count. May be called again."""
        if isinstance(delta, InFewBits):
            self.dropped[push_id] = {
                span.index: self._gain(delta, span)
                for span in self.spans
                if span.index in may_count
            }

    def _gain(self, delta: InFewBits, span: ChunkSpan) -> Tensor:
        after = delta.left_out(span, self.room)
        before = delta.residual.get(span.index)
        return after if before is None else after.sub_(before.to(after.device))

    def clear(self) -> None:
        """What was made before counts elsewhere, or nowhere."""
        self._chunks.clear()
        self.dropped.clear()

    def give_up(self) -> None:
        """Deltas travel in bf16 or above from now on: what was left out before is not sent any more."""
        self._chunks.clear()
        self.is_used = bool(self.dropped)

    # For checkpoints.

    def flat(self, chunks: ByChunk) -> FlatState:
        """Residuals, or gains, of all chunks as one vector; a copy."""
        vectors: dict[Segment, Tensor] = {}
        length = self.layout.lengths[Segment.PARAMETERS]
        if length:
            vector = vectors[Segment.PARAMETERS] = torch.zeros(length)
            for span in self.spans:
                if span.index in chunks:
                    vector[span.start : span.stop] = chunks[span.index]
        return FlatState(self.layout, vectors)

    def cut(self, flat: FlatState) -> dict[int, Tensor]:
        """By chunk, what `flat` made; copies."""
        vector = flat.vectors.get(Segment.PARAMETERS)
        if vector is None:
            return {}
        return {span.index: vector[span.start : span.stop].clone() for span in self.spans}

    def restore(self, residual: FlatState, dropped: Mapping[int, FlatState]) -> None:
        """Go on from what was saved."""
        self.is_used = True
        self._chunks = {index: (each, None) for index, each in self.cut(residual).items()}
        self.dropped = {push: self.cut(flat) for push, flat in dropped.items()}
