"""Error feedback: the rounding error of a quantized push is added to the next one.

With e, the *residual* of the fragment, a = e + delta, and C(a) is sent; once it has counted, e is
decay (a - D(C(a))) (Seide et al. 2014; Karimireddy et al. 2019, arXiv 1901.09847; with a decay below 1
Sarfi et al. 2025, arXiv 2508.15706). So with decay 1 nothing learnt is lost but for the rounding of
fp32. A push that does not count leaves e unchanged; of one that counts in part each chunk is settled by
itself, once a version says which.

The residual is an fp32 copy of the parameters, kept chunk by chunk; a chunk is replaced, never written
to, so the I/O thread may read it. It is on the device of the delta: on an accelerator the codes are
made there at the freeze, and only they come to the host, where any thread may compress them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass, field
from itertools import groupby, islice

import torch
from torch import Tensor

from diloco_protocol import Segment
from diloco_protocol.chunks import ChunkSpan, FragmentLayout
from diloco_protocol.tensors.block_codecs import Encoded
from diloco_protocol.tensors.codecs import (
    BLOCKS,
    add_code,
    decode_chunk,
    encode_sum,
    is_finite,
)
from diloco_protocol.tensors.tensor_pool import mapped
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.placement import HOST

# Returns an uninitialised vector on the host.
Room = Callable[[int, torch.dtype], Tensor]
ByChunk = Mapping[int, Tensor]  # by index in the layout, of chunks of parameters
AT_ONCE = 1 << 23  # elements that an accelerator encodes in one go


@dataclass(frozen=True)
class InFewBits(FlatState):
    """A frozen delta that is sent with the residual, quantized.

    Its vectors are the delta alone, in fp32: the model was at base minus it. On the host a chunk is
    encoded when it is first sent, in any thread; its bytes are kept for repetitions.
    """

    residual: dict[int, Tensor] = field(default_factory=dict)  # zeros where a chunk is missing
    codes: dict[int, memoryview] = field(default_factory=dict)
    from_device: dict[int, Encoded] = field(default_factory=dict)  # until their bytes are needed
    room: Room = mapped
    _ahead: dict[int, Future[memoryview]] = field(default_factory=dict)

    def encode_ahead(self, threads: Executor) -> None:
        """Encode all chunks of parameters in these threads; `chunk` waits for its own."""
        for span in self.layout.spans:
            if span.segment is Segment.PARAMETERS and span.index not in self.codes:
                self._ahead[span.index] = threads.submit(self._encoded, span)

    def encode_here(self, *, in_child: bool = False) -> None:
        """Stop encoding ahead: `chunk` encodes the rest.

        In a forked child nothing is cancelled: the threads do not exist there, and may have held a
        lock.
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

    def encode_on_device(self) -> None:
        """Make the codes of all parameters now: no other thread shall use the accelerator."""
        spans = (span for span in self.layout.spans if span.segment is Segment.PARAMETERS)
        for elements, alike in groupby(spans, key=lambda span: span.elements):
            while some := list(islice(alike, max(1, AT_ONCE // elements))):
                rows = torch.stack([self._sum(span) for span in some])
                if is_finite(rows):
                    made = BLOCKS[self.dtype].encode_rows(rows, self._bytes)
                else:
                    made = [self._coded(span) for span in some]
                self.from_device.update((s.index, each) for s, each in zip(some, made, strict=True))

    def _encoded(self, span: ChunkSpan) -> memoryview:
        made = self.from_device.get(span.index)
        if made is None:  # made on demand, unless another thread has just made it
            return self.codes.get(span.index) or self._coded(span).payload
        code = self.codes[span.index] = made.payload
        self.from_device.pop(span.index, None)
        return code

    def _coded(self, span: ChunkSpan) -> Encoded:
        residual, delta, summed = self.residual.get(span.index), self._delta(span), None
        if residual is not None:
            summed = encode_sum(self.dtype, delta, residual, self._bytes)
        # Beyond the range of fp32 the residual is dropped, and the delta alone is sent.
        return summed or BLOCKS[self.dtype].encode(delta, self._bytes)

    def _sum(self, span: ChunkSpan) -> Tensor:
        delta, residual = self._delta(span), self.residual.get(span.index)
        return delta if residual is None else delta + residual.to(delta.device)

    @torch.no_grad()
    def left_out(self, span: ChunkSpan, room: Room) -> Tensor:
        """What the codes of a chunk omit of delta and residual."""
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
        total = self._sum(span)
        total = total if is_finite(total) else delta
        made = torch.empty_like(total)
        return torch.sub(total, decode_chunk(span, code, self.dtype, made), out=made)

    def _bytes(self, count: int) -> Tensor:
        return self.room(count, torch.uint8)

    def _delta(self, span: ChunkSpan) -> Tensor:
        return self.vectors[span.segment][span.start : span.stop]


@dataclass(eq=False, repr=False)
class Feedback:
    """The residual of a fragment. Belongs to the training thread."""

    layout: FragmentLayout
    room: Room
    decay: float = 1.0  # of what a push leaves out, once it has counted
    is_used: bool = False  # something was quantized
    # By dropped push, what the residual gains by each of its chunks that counts nevertheless.
    dropped: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    # Each with the `why` of its last change, which is made once.
    _chunks: dict[int, tuple[Tensor, object]] = field(default_factory=dict)

    @property
    def spans(self) -> Iterator[ChunkSpan]:
        """The chunks with a residual."""
        return (span for span in self.layout.spans if span.segment is Segment.PARAMETERS)

    @property
    def chunks(self) -> dict[int, Tensor]:
        """The residual by chunk; zeros where one is missing."""
        return {index: values for index, (values, _) in self._chunks.items()}

    def joined(self, delta: FlatState) -> InFewBits:
        """A delta frozen now, to be sent with the residual."""
        self.is_used = True
        made = InFewBits(delta.layout, delta.vectors, delta.dtype, self.chunks, room=self.room)
        if any(vector.device != HOST for vector in delta.vectors.values()):
            made.encode_on_device()
        return made

    def settle(
        self,
        why: object,
        counted: tuple[FlatState, Collection[int]] | None,
        known: Mapping[int, Collection[int]],
    ) -> None:
        """A version was merged into the model. May be called again with the same `why`.

        Args:
            counted: the delta in flight that it counts, and which chunks of it (by index in the layout;
                an earlier push may have contributed the others); None without one.
            known: by dropped push, the chunks that count nevertheless; settles the push.
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
            made = before if sent is None else self._left_out(sent, span)
            for gain in gains:
                made = gain if made is None else made + gain.to(made.device)
            assert made is not None
            self._chunks[at] = (made, why)
            if sent is not None:
                sent.residual.pop(at, None)  # frees its memory for the next chunk
        for push in known:
            self.dropped.pop(push, None)

    def drop(self, push_id: int, delta: FlatState, may_count: Collection[int]) -> None:
        """A push was rejected; a version will say which of these chunks count. May be called again."""
        if isinstance(delta, InFewBits):
            self.dropped[push_id] = {
                span.index: self._gain(delta, span)
                for span in self.spans
                if span.index in may_count
            }

    def _left_out(self, delta: InFewBits, span: ChunkSpan) -> Tensor:
        made = delta.left_out(span, self.room)
        return made if self.decay == 1 else made.mul_(self.decay)

    def _gain(self, delta: InFewBits, span: ChunkSpan) -> Tensor:
        after = self._left_out(delta, span)
        before = delta.residual.get(span.index)
        return after if before is None else after.sub_(before.to(after.device))

    def clear(self) -> None:
        """Discard all: it counts elsewhere, or nowhere."""
        self._chunks.clear()
        self.dropped.clear()

    def give_up(self) -> None:
        """Deltas are not quantized from now on: discard the residual."""
        self._chunks.clear()
        self.is_used = bool(self.dropped)

    # For checkpoints.

    def flat(self, chunks: ByChunk) -> FlatState:
        """Residuals or gains of all chunks as one vector; a copy."""
        vectors: dict[Segment, Tensor] = {}
        length = self.layout.lengths[Segment.PARAMETERS]
        if length:
            vector = vectors[Segment.PARAMETERS] = torch.zeros(length)
            for span in self.spans:
                if span.index in chunks:
                    vector[span.start : span.stop] = chunks[span.index]
        return FlatState(self.layout, vectors)

    def cut(self, flat: FlatState) -> dict[int, Tensor]:
        """The inverse of `flat`, by chunk; copies."""
        vector = flat.vectors.get(Segment.PARAMETERS)
        if vector is None:
            return {}
        return {span.index: vector[span.start : span.stop].clone() for span in self.spans}

    def restore(self, residual: FlatState, dropped: Mapping[int, FlatState]) -> None:
        """Resume from a saved state."""
        self.is_used = True
        self._chunks = {index: (each, None) for index, each in self.cut(residual).items()}
        self.dropped = {push: self.cut(flat) for push, flat in dropped.items()}
