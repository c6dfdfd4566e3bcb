"""The tensors of a relay: means of what its site sent, and versions of its parent's as they came.

A version is kept in wire form, since that is how it goes on to the site. Nothing else outlives a round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from diloco_broker.core import effects, events
from diloco_broker.core.state.model_source import Resumption
from diloco_broker.tensors.aggregate import StagedReducer
from diloco_broker.tensors.parameters import Parameters
from diloco_protocol.chunks import ChunkSpan, FragmentLayout, ModelLayout
from diloco_protocol.dtypes import whole_dtype
from diloco_protocol.feed import OuterGroup
from diloco_protocol.tensors.codecs import decode_chunk, encode_chunk, segment_dtype

Chunks = tuple[memoryview, ...]


class RelayTensors:
    """What the loop asks of tensors (`shell.tensor_work.Tensors`), and a session's `Memory`.

    `wire_dtype` is what means go up in. `say` takes a sentence for people.
    """

    resumption: Resumption | None = None

    def __init__(self, wire_dtype: str, say: Callable[[str], object]) -> None:
        self._wire_dtype, self._say = wire_dtype, say
        self._queue: deque[effects.TensorWork] = deque()
        self._layout: ModelLayout | None = None
        self._reducer = StagedReducer("mean", 0)
        self._means: dict[int, memoryview] = {}  # of the closing round, by chunk
        self.is_averaged = (
            False  # all chunks of a closing round are there, and nobody has been told
        )
        # By push id, what is being sent; by fragment, what arrives and what is held.
        self._outgoing: dict[int, Chunks] = {}
        self._arriving: dict[int, list[memoryview | None]] = {}
        self._held: dict[int, Chunks] = {}
        self.reply_dtype = "fp32"  # what versions come in

    # For the site.

    def begin_anew(self, layout: ModelLayout) -> None:
        """Another life of the site: what was queued for the one before is not wanted."""
        self._queue.clear()
        self._means.clear()
        self.is_averaged = False
        self._layout = layout
        longest = max((s.elements for part in layout.all for s in part.spans), default=0)
        self._reducer = StagedReducer("mean", longest)

    def __bool__(self) -> bool:
        return bool(self._queue)

    def is_ready(self, layout: ModelLayout | None) -> bool:
        return bool(self._queue)

    def add(self, work: effects.TensorWork | effects.AtOnce) -> None:
        """Queue what is to be looked at or averaged. An outer optimizer there is none."""
        match work:
            case effects.Inspect() | effects.AggregateAndStep():
                self._queue.append(work)
            case effects.Fold() | effects.Step() | effects.StoreInitial():
                raise AssertionError(f"a relay keeps whole pushes, and was asked for {work!r:.200}")

    def do_some(self, layout: ModelLayout | None) -> Iterator[events.Event]:
        work = self._queue.popleft()
        span = self._span(work.fragment, work.index)
        match work:
            case effects.Inspect(payload=payload, wire_dtype=wire_dtype):
                squares = self._reducer.squares(span, payload, wire_dtype)
                is_good = squares is not None
                yield events.WorkDone(work, squares or 0.0) if is_good else events.WorkRefused(work)
            case effects.AggregateAndStep(groups=(parts,)):
                self._means[work.index] = self._mean(span, parts)
                size = self._part(work.fragment).chunks
                self.is_averaged = len(self._means) == size

    def _mean(self, span: ChunkSpan, parts: Sequence[effects.WholePush]) -> memoryview:
        found = self._reducer.reduced(span, parts)
        assert found is not None, "a round of nothing"
        values = found.whole().to(segment_dtype(span.segment, self._wire_dtype))
        return encode_chunk(span, values.contiguous(), self._wire_dtype)

    def push(self, push_id: int) -> None:
        """What was averaged last is sent under this id."""
        self._outgoing[push_id] = tuple(self._means[index] for index in sorted(self._means))
        self._means.clear()
        self.is_averaged = False

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
        self._arriving[layout.fragment] = [None] * layout.chunks

    def store(self, fragment: int, index: int, payload: Any, wire_dtype: str) -> None:
        """Keep a chunk as it came; the memory of the message is ZeroMQ's."""
        self._arriving[fragment][index] = memoryview(bytes(payload))
        self.reply_dtype = wire_dtype

    def follow(
        self, fragment: int, index: int, payload: Any, wire_dtype: str, parts: Sequence[int]
    ) -> int | None:
        return None  # differences are not asked for

    def finish(self, fragment: int) -> Chunks:
        arrived = self._arriving.pop(fragment)
        held = self._held[fragment] = tuple(each for each in arrived if each is not None)
        assert len(held) == len(arrived), "a version with a hole"
        return held

    def held(self, fragment: int) -> Chunks | None:
        return self._held.get(fragment)

    def forget(self) -> None:
        self._held.clear()
        self._arriving.clear()

    def prepare(self, push_id: int, layout: FragmentLayout) -> bool:
        """Lay out the version that is held for a parent that has lost it: parameters in fp32."""
        held = self._held.get(layout.fragment)
        if held is None:
            self._say(
                "The parent has no parameters and asks this relay, which has none either: start the "
                "parent with --model, or let a worker join it directly."
            )
            return False
        reply = whole_dtype(self.reply_dtype)
        self._outgoing[push_id] = tuple(
            encode_chunk(
                span, decode_chunk(span, wire, reply).to(segment_dtype(span.segment)), "fp32"
            )
            for span, wire in zip(layout.spans, held, strict=True)
        )
        return True

    def name(self, layout: FragmentLayout) -> None:
        raise AssertionError("a relay has no frozen parameters of its own")

    def chunk(self, push_id: int, fragment: int, index: int) -> memoryview:
        return self._outgoing[push_id][index]

    def drop(self, push_id: int) -> None:
        self._outgoing.pop(push_id, None)

    def _part(self, fragment: int) -> FragmentLayout:
        assert self._layout is not None
        return self._layout.all[fragment]

    def _span(self, fragment: int, index: int) -> ChunkSpan:
        return self._part(fragment).spans[index]
