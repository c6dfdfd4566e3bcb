"""The tensors of a relay: means of what its site sent, and versions of its parent's as they came.

A version is kept as it goes on to the site: in the dtype that its chunks came in, or in fp32 where they
come as differences in few bits. Besides it only what means in few bits left out outlives a round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from diloco_broker.core import effects, events
from diloco_broker.core.versions.record import Resumption
from diloco_broker.relay.means import Mean, Residuals, room_for
from diloco_broker.shell.tensor_work.executor import looked_at
from diloco_broker.tensors.aggregate import StagedReducer
from diloco_broker.tensors.parameters import Parameters
from diloco_protocol.chunks import ChunkSpan, FragmentLayout, ModelLayout
from diloco_protocol.feed import OuterGroup
from diloco_protocol.tensors.codecs import (
    decode_chunk,
    encode_chunk,
    has_nan,
    is_finite,
    segment_dtype,
)
from diloco_worker.model.flat_state import FlatState

Chunks = tuple[memoryview, ...]


class RelayTensors:
    """What the loop asks of tensors (`shell.tensor_work.Tensors`), and a session's `Memory`."""

    resumption: Resumption | None = None

    def __init__(self) -> None:
        self._wire_dtype = "fp32"  # what means go up in
        self._reply = "fp32"  # what versions go on to the site in
        self._queue: deque[effects.TensorWork] = deque()
        self._layout: ModelLayout | None = None
        self._reducer = StagedReducer("mean", 0)
        self._mean: Mean | None = None  # of the closing round
        self.residuals = Residuals()
        # All chunks of a closing round are there, and nobody has been told.
        self.is_averaged = False
        # What a worker of the site gives of each fragment, in fp32, for a parent that has no parameters,
        # and the chunks that are missing.
        self._gifts: dict[int, tuple[FlatState, set[int]]] = {}
        # By push id, what is being sent; by fragment, what arrives (its layout, until the first chunk
        # says in which dtype) and what is held.
        self._outgoing: dict[int, FlatState] = {}
        self._arriving: dict[int, FragmentLayout | FlatState] = {}
        self._held: dict[int, FlatState] = {}

    # For the site.

    def begin_anew(self, layout: ModelLayout, wire_dtype: str, reply: str) -> None:
        """Another life of the site: nothing queued is wanted. Means go up in this dtype, and the site
        gets versions in that of `reply`."""
        self._queue.clear()
        self._mean, self.is_averaged = None, False
        self._layout, self._wire_dtype, self._reply = layout, wire_dtype, reply
        self.residuals.lay_out(layout)
        longest = max((s.elements for part in layout.all for s in part.spans), default=0)
        self._reducer = StagedReducer("mean", longest)

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, work: effects.TensorWork | effects.AtOnce) -> None:
        """Queue what is to be looked at or averaged. An outer optimizer there is none."""
        match work:
            case effects.Inspect() | effects.AggregateAndStep():
                self._queue.append(work)
            case effects.StoreInitial():
                self._queue.append(work)
            case effects.DropInitial(fragments):
                initial = effects.StoreInitial
                self._queue = deque(each for each in self._queue if not isinstance(each, initial))
                for fragment in fragments:
                    self._gifts.pop(fragment, None)
            case effects.Fold() | effects.Step():
                raise AssertionError(f"a relay keeps whole pushes, and was asked for {work!r:.200}")

    def do_some(self, layout: ModelLayout | None) -> Iterator[events.Event]:
        work = self._queue.popleft()
        span = self._span(work.fragment, work.index)
        match work:
            case effects.Inspect(payload=payload, wire_dtype=wire_dtype):
                yield looked_at(work, self._reducer.squares(span, payload, wire_dtype))
            case effects.AggregateAndStep(groups=(parts,)):
                if self._mean is None:
                    self._mean = Mean(self._part(work.fragment), self._wire_dtype)
                found = self._reducer.reduced(span, parts)
                assert found is not None, "a round of nothing"
                self._mean.put(span, found.whole())
                self.is_averaged = self._mean.is_whole
            case effects.StoreInitial(payload=payload):
                yield from self._take_gift(work, span, decode_chunk(span, payload, "fp32"))

    def _take_gift(
        self, work: effects.StoreInitial, span: ChunkSpan, values: Tensor
    ) -> Iterator[events.Event]:
        """A chunk that a worker gives."""
        assert self._layout is not None
        is_frozen = work.fragment == self._layout.frozen.fragment
        told = values.to(segment_dtype(span.segment, self._reply))
        if has_nan(told) or not (is_frozen or is_finite(told)):
            yield events.InitialRefused(work)
            return
        if work.fragment not in self._gifts:
            part = self._part(work.fragment)
            self._gifts[work.fragment] = room_for(part, "fp32"), set(range(part.chunks))
        gift, missing = self._gifts[work.fragment]
        gift.vectors[span.segment][span.start : span.stop].copy_(values)
        missing.discard(work.index)
        yield events.InitialStored(work, encode_chunk(span, told.clone(), self._reply))

    def hand_up(self, pushes: Mapping[int, int]) -> None:
        """What was given is sent under these ids, by fragment. It is kept: it may be asked for again."""
        for fragment, push_id in pushes.items():
            self._outgoing[push_id] = self._gifts[fragment][0]

    def hold(self, fragments: Iterable[int]) -> None:
        """What was given of these is the version that is held, as it would have come."""
        for fragment in fragments:
            given, _ = self._gifts.pop(fragment)
            held = self._held[fragment] = room_for(given.layout, self._reply)
            for segment, vector in given.vectors.items():
                held.vectors[segment].copy_(vector)

    def push(self, push_id: int) -> None:
        """What was averaged last is sent under this id."""
        assert self._mean is not None, "nothing was averaged"
        self._outgoing[push_id] = self.residuals.joined(push_id, self._mean.state)
        self._mean, self.is_averaged = None, False

    def outer_groups(self) -> tuple[OuterGroup, ...]:
        return ()

    def of(self, layout: ModelLayout | None) -> Parameters:
        raise AssertionError("a relay saves nothing")

    def forget_sources(self) -> None:
        pass

    def close(self) -> None:
        self._queue.clear()

    # For the session.

    def begin(self, layout: FragmentLayout) -> None:
        self._arriving[layout.fragment] = layout

    def store(self, fragment: int, index: int, payload: Any, wire_dtype: str) -> None:
        """Keep a chunk as it came; it has the length of its place (`check_length`)."""
        self._room(fragment, wire_dtype).store(index, payload, wire_dtype)

    def follow(
        self, fragment: int, index: int, payload: Any, wire_dtype: str, parts: Sequence[int]
    ) -> int | None:
        """Keep what comes of a difference from the version held, in fp32, as the parent has it."""
        held = self._held.get(fragment)
        if held is None or held.dtype != "fp32":
            return None
        return self._room(fragment, "fp32").follow(index, held, payload, parts, wire_dtype)

    def _room(self, fragment: int, dtype: str) -> FlatState:
        """Where a version is assembled. Each has memory of its own: the site is sent what is there."""
        room = self._arriving[fragment]
        if isinstance(room, FragmentLayout):
            room = self._arriving[fragment] = room_for(room, dtype)
        return room

    def finish(self, fragment: int) -> Chunks:
        arrived = self._arriving.pop(fragment)
        assert isinstance(arrived, FlatState), "a version without a chunk"
        self._held[fragment] = arrived
        self._gifts.pop(fragment, None)
        return _chunks_of(arrived)

    def held(self, fragment: int) -> Chunks | None:
        held = self._held.get(fragment)
        return None if held is None else _chunks_of(held)

    def forget(self) -> None:
        self._held.clear()
        self._arriving.clear()

    def prepare(self, push_id: int, layout: FragmentLayout) -> bool:
        """Lay out what a parent that has no parameters is given, in fp32: the version held, or what a
        worker has given. False where it has yet to be asked for."""
        held = self._held.get(layout.fragment)
        if held is None:
            _, missing = self._gifts.get(layout.fragment, (None, {0}))
            if not missing:
                self.hand_up({layout.fragment: push_id})
            return not missing
        vectors = {s: v.to(segment_dtype(s)) for s, v in held.vectors.items()}
        self._outgoing[push_id] = FlatState(layout, vectors)
        return True

    def name(self, layout: FragmentLayout) -> None:
        raise AssertionError("a relay has no frozen parameters of its own")

    def chunk(self, push_id: int, fragment: int, index: int) -> memoryview:
        return self._outgoing[push_id].chunk(index)

    def drop(self, push_id: int) -> None:
        self._outgoing.pop(push_id, None)

    def _part(self, fragment: int) -> FragmentLayout:
        assert self._layout is not None
        return self._layout.all[fragment]

    def _span(self, fragment: int, index: int) -> ChunkSpan:
        return self._part(fragment).spans[index]


def _chunks_of(state: FlatState) -> Chunks:
    """As they are sent: views of its memory."""
    return tuple(state.chunk(index) for index in range(state.layout.chunks))
