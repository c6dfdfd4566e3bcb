"""What goes up from a site: the mean of a round, and in few bits what earlier ones have left out.

In few bits the mean is sent with the residual of its fragment (error feedback, see the worker's
`model.feedback`, which keeps it here too). The relay is the one place where a site's mean is rounded, so
the residual is the relay's: a worker has one only of what it rounds itself, on its way to the relay.

A residual belongs to no version. It outlives each life of the site, and ends with the process: then it
begins at zero, and what the last push left out is lost, as with a worker that dies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from diloco_protocol.chunks import ChunkSpan, FragmentLayout, ModelLayout
from diloco_protocol.dtypes import in_few_bits
from diloco_protocol.tensors.codecs import segment_dtype
from diloco_protocol.tensors.tensor_pool import mapped
from diloco_worker.model.feedback import Feedback, InFewBits
from diloco_worker.model.flat_state import FlatState


def room_for(layout: FragmentLayout, wire_dtype: str) -> FlatState:
    """Room for a fragment as it travels in this dtype, or in fp32 in few bits; not initialised."""
    vectors = {
        segment: mapped(length, segment_dtype(segment, wire_dtype))
        for segment, length in layout.lengths.items()
        if length
    }
    return FlatState(layout, vectors, wire_dtype)


class Mean:
    """The mean of a closing round while it is being made, chunk by chunk."""

    def __init__(self, layout: FragmentLayout, wire_dtype: str) -> None:
        self.state = room_for(layout, wire_dtype)
        self._missing = set(range(layout.chunks))

    def put(self, span: ChunkSpan, values: Tensor) -> None:
        self.state.vectors[span.segment][span.start : span.stop].copy_(values)
        self._missing.discard(span.index)

    @property
    def is_whole(self) -> bool:
        return not self._missing


class Residuals:
    """See the head of this module."""

    def __init__(self) -> None:
        self._layout: ModelLayout | None = None
        self._by_fragment: dict[int, Feedback] = {}
        self._sent: dict[int, InFewBits] = {}  # by push id, those that may be in a later version

    def lay_out(self, layout: ModelLayout) -> None:
        """The site begins anew; with another model nothing is left of what it had."""
        if self._layout != layout:
            self._by_fragment.clear()
            self._sent.clear()
        self._layout = layout

    def of(self, fragment: int) -> dict[int, Tensor]:
        """The residual of a fragment, by chunk; zeros where one is missing."""
        found = self._by_fragment.get(fragment)
        return {} if found is None else found.chunks

    def joined(self, push_id: int, mean: FlatState) -> FlatState:
        """What is sent under this id: the mean, in few bits with the residual."""
        fragment = mean.layout.fragment
        if not in_few_bits(mean.dtype):
            if fragment in self._by_fragment:  # the run's dtype is another one now
                self._by_fragment[fragment].give_up()
            return mean
        feedback = self._by_fragment.setdefault(fragment, Feedback(mean.layout, mapped))
        made = self._sent[push_id] = feedback.joined(mean)
        return made

    def abandoned(self, push_id: int) -> None:
        """Nobody waits for this push, and a version may have it all the same."""
        if (sent := self._sent.pop(push_id, None)) is not None:
            layout = sent.layout
            self._by_fragment[layout.fragment].drop(push_id, sent, range(layout.chunks))

    def forget(self, push_id: int) -> None:
        """This push is in no version: the residual stays what it was."""
        self._sent.pop(push_id, None)
        for feedback in self._by_fragment.values():
            feedback.dropped.pop(push_id, None)

    def settle(self, why: object, fragment: int, counted: Mapping[int, Collection[int]]) -> None:
        """Settle the site's pushes that a version contains.

        Args:
            why: identifies the version; a second call for it changes nothing.
            fragment: the version's.
            counted: by push id, the chunks whose values the version contains, by index in the layout.
        """
        feedback = self._by_fragment.get(fragment)
        if feedback is None:
            return
        flight = None
        for push_id in [each for each in counted if each in self._sent]:
            sent = self._sent.pop(push_id)
            if flight is None and _is_latest(sent, feedback.chunks):
                flight = sent, counted[push_id]
            else:  # what another one left out has come to the residual since it was sent
                feedback.drop(push_id, sent, counted[push_id])
        dropped = {each: own for each, own in counted.items() if each in feedback.dropped}
        feedback.settle(why, flight, dropped)


def _is_latest(sent: InFewBits, residual: Mapping[int, Tensor]) -> bool:
    """Was it sent with the residual as it is?"""
    return sent.residual.keys() == residual.keys() and all(
        sent.residual[index] is values for index, values in residual.items()
    )
