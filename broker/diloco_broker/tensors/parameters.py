"""The tensors of the run: master parameters, outer state, accumulators, and the chunks in wire form.

All operations work on one chunk at a time, so that the loop can interleave them with messages; only a
torch optimizer steps whole tensors (see `torch_optim`). A chunk that was passed to a reader is never
modified: a step makes a new tensor, and the old one is freed when its last reader releases it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from diloco_broker.config.schedule import UNCHANGING, OuterSchedule
from diloco_broker.core.effects import WholePush
from diloco_broker.core.events import Stepped
from diloco_broker.tensors.advance import Advance, Advanced, Kept, in_wire_form
from diloco_broker.tensors.aggregate import Gradient, StagedReducer, StreamingMean
from diloco_broker.tensors.blend import Blend
from diloco_broker.tensors.memory import empty, empty_like
from diloco_broker.tensors.outer import chunked
from diloco_broker.tensors.outer.make import Outer
from diloco_broker.tensors.outer.torch_fragment import placed
from diloco_broker.tensors.outer.torch_optim import TorchOuter, WholeTensors
from diloco_broker.tensors.piece import Piece
from diloco_broker.tensors.radial import Radial
from diloco_broker.tensors.replica import REPLICA, in_full
from diloco_broker.tensors.robust import Stretches
from diloco_protocol.chunks import ChunkSpan, ModelLayout, Segment
from diloco_protocol.dtypes import is_quantized, whole_dtype
from diloco_protocol.feed import OuterGroup
from diloco_protocol.tensors.codecs import decode_chunk, encode_chunk, segment_dtype
from diloco_protocol.tensors.state_dict import cut_chunk


@dataclass(frozen=True)
class FragmentTensors:
    """The tensors of one fragment."""

    chunks: Sequence[Tensor]  # master values, fp32 or int64
    # The outer optimizer's state of each chunk, by name; None before the first step.
    outer: Mapping[str, Sequence[Tensor | None]] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None  # a torch optimizer's `state_dict`
    reply: str = "fp32"  # dtype in which its values were sent


class Parameters:
    """The master copy of every chunk, and the operations that update it.

    `fold`, `step`, `merge` and `inspect` return work that may run in other threads.

    Args:
        outer: the outer optimizer, shared by all fragments; its state is kept for each chunk.
        wire: default dtype of streamed pseudo-gradients.
        reply: dtype of parameters that are sent to workers.
        aggregate: aggregate of complete pushes, one of `robust.AGGREGATES`.
        trim: share of pushes that `trimmed-mean` leaves out at each end.
        is_round: whether a gradient is that of a round. Then the maximum of its integers replaces their
            value; otherwise their value never decreases, because a single push may be stale.
        share: how far a buffer moves towards the pushed values: 1 (completely) if they are the mean of a
            round, 1/workers if each push is applied by itself.
        initial: tensors of the model file by name, or None.
        schedule: schedules of learning rate and momentum over rounds.
    """

    def __init__(
        self,
        layout: ModelLayout,
        outer: Outer,
        *,
        wire: str,
        reply: str,
        aggregate: str = "mean",
        trim: float = 0.2,
        is_round: bool = True,
        share: float = 1.0,
        initial: Mapping[str, Tensor] | None = None,
        schedule: OuterSchedule = UNCHANGING,
    ) -> None:
        self._outer, self._schedule = outer, schedule
        self.layout = layout
        self._layouts = layout.all
        self._reply = reply
        self._whole_reply = whole_dtype(reply)  # of chunks that are not differences
        self._is_round = is_round
        self._share = share
        self._initial = initial
        # By fragment and index, the values that workers hold, if replies are quantized; never modified.
        self._replicas: dict[tuple[int, int], Tensor] = {}
        self._means = [StreamingMean(part, wire) for part in layout.fragments]
        spans = [span for part in layout.all for span in part.spans]
        self._staged = StagedReducer(aggregate, max((s.elements for s in spans), default=0), trim)
        self._radial = Radial(layout, self._staged.decode) if aggregate == "rda" else None
        self._masters: list[list[Tensor | None]] = [[None] * p.chunks for p in layout.all]
        self._states: list[list[chunked.State]] = [[{} for _ in p.spans] for p in layout.all]
        self._wholes: dict[int, WholeTensors] = {}

    def place(self, fragment: int, index: int, payload: Any = None) -> Any | None:
        """Store a chunk of the first version: from a seed worker, or the model file (payload None).

        Returns the chunk in wire form, or None if it is not finite there (NaN, if it is frozen). Raises
        UsageError if a factory of outer optimizers fails, which is called when its fragment is complete.
        """
        span = self._layouts[fragment].spans[index]
        if payload is None:
            assert self._initial is not None
            values = empty(span.elements, segment_dtype(span.segment))
            cut_chunk(self._initial, self._layouts[fragment], span, values)
        else:
            sent = decode_chunk(span, payload, "fp32")
            values = empty_like(sent).copy_(sent)
        reply = self._in_wire_form(fragment, span, values)
        if reply is None:
            return None
        self._masters[fragment][index] = values
        self._make_whole(fragment, index)
        if self._has_replica(span):
            self._replicas[fragment, index] = values
            return in_full(values)
        return encode_chunk(span, reply, self._whole_reply)

    def drop(self, fragments: Iterable[int]) -> bool:
        """Drop the stored chunks of these fragments. Returns whether any chunks are left."""
        for fragment in fragments:
            self._masters[fragment] = [None] * len(self._masters[fragment])
            self._states[fragment] = [{} for _ in self._states[fragment]]
            self._wholes.pop(fragment, None)
            self._replicas = {
                key: each for key, each in self._replicas.items() if key[0] != fragment
            }
        return any(value is not None for masters in self._masters for value in masters)

    def forget_initial(self) -> None:
        """Release the model file's tensors: every chunk has been stored."""
        self._initial = None

    def fold(
        self, fragment: int, index: int, payload: Any, weight: float, wire: str | None = None
    ) -> Piece[float | None]:
        """Add a chunk of a push, in its own wire dtype or the run's; as `StreamingMean.fold`."""
        return self._means[fragment].fold(index, payload, weight, wire)

    def overdue(self) -> Iterator[tuple[int, int, Piece[None]]]:
        """Work to add held contributions to accumulators: fragment, index, work."""
        for fragment, mean in enumerate(self._means):
            while (index := mean.overdue()) is not None:
                yield fragment, index, mean.adding_up(index)

    def inspect(
        self, fragment: int, index: int, payload: Any, wire_dtype: str
    ) -> Piece[float | None]:
        """The sum of a chunk's squared values (0 unless they are parameters); None if not finite."""
        span = self._layouts[fragment].spans[index]
        return Piece(lambda: self._staged.squares(span, payload, wire_dtype), lambda found: found)

    def outer_groups(self) -> tuple[OuterGroup, ...]:
        """The parameter groups of the torch optimizers, over all fragments; empty without any."""
        return tuple(
            group for _, each in sorted(self._wholes.items()) for group in each.fragment.groups()
        )

    def tune(
        self,
        outer: Outer,
        share: float,
        own: Mapping[str, float],
        schedule: OuterSchedule = UNCHANGING,
    ) -> None:
        """Change settings, `own` for all groups of torch optimizers; optimizers keep their state."""
        self._outer, self._schedule, self._share = outer, schedule, share
        for whole in self._wholes.values():
            whole.fragment.tune(own)

    def step(self, fragment: int, index: int, weight: float, count: int) -> Piece[list[Stepped]]:
        """The outer step of one chunk, with the mean of the folded contributions; see `effects.Step`.

        Returns:
            This chunk. An optimizer that steps whole tensors returns nothing for a chunk of parameters
            until the last of them, and then all of them.
        """
        mean = self._means[fragment].take(index, weight)
        return self._advancing(fragment, index, [mean], count)

    def merge(
        self,
        fragment: int,
        index: int,
        groups: Sequence[Sequence[WholePush]],
        count: int,
        wholes: Sequence[Sequence[WholePush]] = (),
    ) -> Piece[list[Stepped]]:
        """The outer steps of one chunk, in order; see `effects.AggregateAndStep`.

        An empty group counts, but leaves the chunk's value and state unchanged, except for a due buffer.
        `wholes` are all pushes of the version, by default those of the groups.
        """
        span = self._layouts[fragment].spans[index]
        stretches: list[Stretches] = [()] * len(groups)
        if self._radial is not None:
            stretches = [
                self._radial.stretches(fragment, index, pushes, turn)
                for turn, pushes in enumerate(wholes or groups, start=count)
            ]
        reduced = (
            self._staged.reduced(span, parts, each)
            for parts, each in zip(groups, stretches, strict=True)
        )
        return self._advancing(fragment, index, reduced, count)

    def wires(self, fragment: int) -> list[Any]:
        """The fragment's chunks in wire form."""
        return [self._as_held(fragment, span) for span in self._layouts[fragment].spans]

    def fragment_tensors(self, fragment: int) -> FragmentTensors:
        """The fragment's values and its outer optimizer's state, which never change."""
        masters, states = self._masters[fragment], self._states[fragment]
        chunks = [placed(masters, index) for index in range(len(masters))]
        names = sorted({name for state in states for name in state})
        outer = {name: [state.get(name) for state in states] for name in names}
        replicas = [self._replicas.get((fragment, index)) for index in range(len(masters))]
        if any(each is not None for each in replicas):
            outer[REPLICA] = replicas
        whole = self._wholes.get(fragment)
        optimizer = whole.fragment.state_dict() if whole else None
        return FragmentTensors(chunks, outer, optimizer, self._reply)

    def put_back(self, fragment: int, kept: FragmentTensors) -> None:
        """Restore the result of `fragment_tensors`, whose tensors must not be modified any more."""
        self._masters[fragment][:] = kept.chunks
        for index in range(len(kept.chunks)):
            found = {name: tensors[index] for name, tensors in kept.outer.items()}
            self._put_back_replica(fragment, index, found.pop(REPLICA, None), kept.reply)
            self._states[fragment][index] = {n: t for n, t in found.items() if t is not None}
            self._make_whole(fragment, index)
        if kept.optimizer is not None:
            self._wholes[fragment].fragment.load_state_dict(dict(kept.optimizer))

    def _put_back_replica(
        self, fragment: int, index: int, replica: Tensor | None, sent_in: str
    ) -> None:
        span, master = self._layouts[fragment].spans[index], placed(self._masters[fragment], index)
        if self._has_replica(span):
            if replica is None:  # workers hold the master in the dtype in which it was sent
                sent = master.to(segment_dtype(span.segment, whole_dtype(sent_in)))
                replica = sent.float()
            self._replicas[fragment, index] = replica
        elif replica is not None:
            # Replies were quantized: the run continues from the workers' replica.
            self._masters[fragment][index] = replica

    def _has_replica(self, span: ChunkSpan) -> bool:
        """Whether a chunk is sent as a difference from its replica."""
        return is_quantized(self._reply) and span.segment is Segment.PARAMETERS

    def _as_held(self, fragment: int, span: ChunkSpan) -> Any:
        """A chunk of the current version in wire form."""
        if self._has_replica(span):
            return in_full(self._replicas[fragment, span.index])
        master = placed(self._masters[fragment], span.index)
        reply = self._in_wire_form(fragment, span, master)
        assert reply is not None, "a chunk that could not be sent was stored"
        return encode_chunk(span, reply, self._whole_reply)

    def forget_buffer(self, fragment: int) -> None:
        """Drop the gradients of a fragment that the outer optimizer has buffered."""
        for index, state in enumerate(self._states[fragment]):
            self._states[fragment][index] = chunked.without(state, chunked.DELAYED)

    def _advancing(
        self, fragment: int, index: int, gradients: Iterable[Gradient | Blend | None], count: int
    ) -> Piece[list[Stepped]]:
        span = self._layouts[fragment].spans[index]
        if isinstance(self._outer, TorchOuter) and span.segment is Segment.PARAMETERS:
            advance_whole = partial(self._advance_whole, fragment, index, gradients, count)
            return Piece(lambda: None, lambda _: advance_whole())
        advance, kept = self._advance(fragment, span), self._kept(fragment, index)

        def put(found: Advanced) -> list[Stepped]:
            return [self._put(fragment, span, found)]

        return Piece(lambda: advance.of(kept, gradients, count), put)

    def _advance_whole(
        self, fragment: int, index: int, gradients: Iterable[Gradient | Blend | None], count: int
    ) -> list[Stepped]:
        whole = self._wholes[fragment]
        turns = whole.collect(index, [None if each is None else each.whole() for each in gradients])
        if turns is None:
            return []
        overflowed: set[int] = set()
        for turn, found in enumerate(turns, start=count):
            overflowed |= whole.advance(found, turn, self._schedule.factor(turn))
        spans = self._layouts[fragment].spans
        done = []
        for span in spans:
            if span.segment is Segment.PARAMETERS:
                kept, overflow = self._kept(fragment, span.index), span.index in overflowed
                sent = self._advance(fragment, span).sent(kept, overflow=overflow)
                done.append(self._put(fragment, span, sent))
        return done

    def _advance(self, fragment: int, span: ChunkSpan) -> Advance:
        outer = None if isinstance(self._outer, TorchOuter) else self._outer
        return Advance(span, outer, self._schedule, self._reply, self._share, self._is_round)

    def _kept(self, fragment: int, index: int) -> Kept:
        master = placed(self._masters[fragment], index)
        return Kept(master, self._states[fragment][index], self._replicas.get((fragment, index)))

    def _put(self, fragment: int, span: ChunkSpan, found: Advanced) -> Stepped:
        kept, index = found.kept, span.index
        self._masters[fragment][index] = kept.master
        self._states[fragment][index] = kept.state
        if kept.replica is not None:
            self._replicas[fragment, index] = kept.replica
        return Stepped(fragment, index, found.wire, found.overflow)

    def _make_whole(self, fragment: int, index: int) -> None:
        """Create the torch optimizer of a fragment once all its parameters are stored."""
        layout, masters = self._layouts[fragment], self._masters[fragment]
        is_stepped = layout.spans[index].segment is Segment.PARAMETERS
        if not isinstance(self._outer, TorchOuter) or not is_stepped:
            return
        if fragment in self._wholes:
            self._wholes[fragment].fragment.load(masters, [index])
        elif all(
            masters[s.index] is not None for s in layout.spans if s.segment is Segment.PARAMETERS
        ):
            self._wholes[fragment] = WholeTensors(
                self._outer, layout, masters, self._states[fragment], self._fits
            )

    def _fits(self, span: ChunkSpan, values: Tensor) -> bool:
        """Whether a chunk of trained parameters can be sent."""
        return in_wire_form(span, values, self._reply) is not None

    def _in_wire_form(self, fragment: int, span: ChunkSpan, values: Tensor) -> Tensor | None:
        is_frozen = fragment == self.layout.frozen.fragment
        return in_wire_form(span, values, self._reply, frozen=is_frozen)
