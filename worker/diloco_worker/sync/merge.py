"""The values of one fragment: freezing a delta, and merging its reply into the model.

`sync.boundary` decides what to do and when; here are the tensors. Training may go on while a delta is
in flight, so up to two more copies of the fragment are kept with it, where needed:

- *frozen*, the model at the freeze, for the merge "rebase": local <- new + (local - frozen);
- its *anchor*, the model when training stopped waiting for the push: later steps are kept completely,
  on top of the merge as it would have been then.

For quantized deltas there is a *residual*, too (`model.feedback`), which is sent with the next. A merge
may be interrupted: the base stays what it was until the model is complete, and the same merge resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field

import torch

from diloco_protocol import Kind, RunConfig
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.dtypes import is_quantized
from diloco_worker.model.feedback import Feedback, InFewBits
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.merging import Change
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.sync.fragment import InFlight, Merge, Outcome, overlaps
from diloco_worker.sync.ports import NonFinite


@dataclass(eq=False, repr=False)
class DeltaValues:
    """The values of a delta in flight."""

    wire: FlatState  # as it is sent
    frozen: FlatState | None = None
    anchor: FlatState | None = None


@dataclass(frozen=True)
class SavedFeedback:
    """The residual of a fragment for a checkpoint, and its gains by chunks of dropped pushes."""

    residual: FlatState
    dropped: Mapping[int, FlatState]  # by push id


@dataclass(eq=False, repr=False)
class FragmentValues:
    """The tensors of one fragment. Belongs to the training thread."""

    part: FragmentLayout
    tensors: ModelTensors
    config: RunConfig
    base: FlatState  # deltas are measured from it
    # Of the in-flight push, or of one that ended while the model was left as it is.
    delta: DeltaValues | None
    # Called with each new base, and what it came as; the former base may be overwritten then.
    set_base: Callable[[int, FlatState, FlatState], None]
    kept_on: torch.device  # where the base is
    saved: InitVar[SavedFeedback | None] = None
    feedback: Feedback = field(init=False)

    def __post_init__(self, saved: SavedFeedback | None) -> None:
        self.feedback = Feedback(self.part, self.tensors.room, self.config.feedback_decay)
        if saved is not None:
            self.feedback.restore(saved.residual, saved.dropped)
        if self.delta is not None and isinstance(self.delta.wire, InFewBits):
            self.delta.wire.residual.update(self.feedback.chunks)
        self._set_base(self.base.to(self.kept_on), self.base)

    def _set_base(self, base: FlatState, came_as: FlatState) -> None:
        self.base = base
        self.set_base(self.part.fragment, base, came_as)

    @property
    def _rebases(self) -> bool:
        return self.config.fragment_merge == "rebase"

    def freeze(self, dtype: str) -> float | NonFinite | None:
        """Freeze global minus local into `delta`, in this wire dtype, unless it is not finite.

        Returns the Euclidean length of its parameters, where known.
        """
        frozen = None
        if self._rebases and overlaps(self.config):
            frozen = self.tensors.capture(self.part)
        delta = self.tensors.delta(self.base, dtype, frozen)
        if delta.bad is not None:
            kinds = {entry.name: entry.kind for entry in self.tensors.manifest.entries}
            return NonFinite(delta.bad, kinds[delta.bad] is Kind.BUFFER)
        if is_quantized(dtype):
            wire: FlatState = self.feedback.joined(delta.wire)
        else:
            wire = delta.wire
            self.feedback.give_up()
        self.delta = DeltaValues(wire, frozen)
        return delta.norm

    def keep_anchor(self) -> None:
        """Record the model: training goes on with the delta in flight."""
        delta = self.delta
        if delta is not None and delta.frozen is None and delta.anchor is None:
            delta.anchor = self.tensors.capture(self.part)

    def apply(self, merge: Merge, step: int) -> None:
        """Bring the model in line, after this step. Interrupted, it resumes when called again."""
        if merge.is_applied:  # interrupted after its end
            return
        change: Change = merge.change or self._change_of(merge, step)
        if merge.is_void and not change.is_void:
            change = Change(change.new, is_void=True)
        merge.change = change
        self.tensors.bring_in(change)
        self._keep(merge, change.new)
        merge.is_applied = True

    def _change_of(self, merge: Merge, step: int) -> Change:
        in_flight, arrival = merge.in_flight, merge.arrival
        match merge.outcome:
            case Outcome.RESTORED:
                return Change(self.base if in_flight is None else self._at_freeze(), is_void=True)
            case Outcome.REJECTED:
                # The delta is taken out; the steps made since stay.
                assert in_flight is not None
                is_now = step == in_flight.began
                return Change(self.base, origin=None if is_now else self._at_freeze())
        assert arrival is not None
        new = self.base if arrival.values is None else arrival.values.to(self.kept_on)
        if merge.outcome is Outcome.MOVED:
            return Change(new, origin=self.base)
        if merge.outcome is Outcome.COUNTED and not merge.is_load:
            assert in_flight is not None
            return self._merged(in_flight, new, step)
        return Change(new)

    def _merged(self, in_flight: InFlight, new: FlatState, step: int) -> Change:
        delta = self.delta
        assert delta is not None
        origin = delta.anchor
        if origin is None and not overlaps(self.config) and step != in_flight.began:
            origin = self._at_freeze()  # training went on after an interrupt
        if self._rebases and delta.frozen is not None:
            origin = delta.frozen
        return Change(new, 0.0 if self._rebases else self.config.fragment_update_alpha, origin)

    def _keep(self, merge: Merge, new: FlatState) -> None:
        """The merge is complete: release its inputs. May be called again."""
        delta, outcome = self.delta, merge.outcome
        if outcome is Outcome.RESTORED:
            if merge.in_flight is not None and delta is not None and delta.anchor is not None:
                delta.anchor = new
        elif outcome is Outcome.LOADED and merge.in_flight is not None:
            assert delta is not None
            delta.anchor = delta.frozen = new
        else:
            self._keep_residual(merge)
            if merge.arrival is not None:
                self._set_base(new, merge.arrival.values or new)
            self.delta = None

    def _keep_residual(self, merge: Merge) -> None:
        delta, feedback = self.delta, self.feedback
        match merge.outcome:
            case Outcome.SUPERSEDED:
                feedback.clear()
            case Outcome.REJECTED if delta is not None and merge.in_flight is not None:
                feedback.settle(merge, None, self._own(merge.settled))
                if merge.may_count:
                    push_id = merge.in_flight.push_id
                    chunks = self._own({push_id: merge.may_count})[push_id]
                    feedback.drop(push_id, delta.wire, chunks)
            case Outcome.COUNTED if delta is not None:
                assert merge.in_flight is not None
                settled = self._own(merge.settled)
                counted = delta.wire, settled.pop(merge.in_flight.push_id)
                feedback.settle(merge.arrival, counted, settled)
            case Outcome.MOVED | Outcome.LOADED:
                feedback.settle(merge.arrival, None, self._own(merge.settled))

    def _own(self, settled: Mapping[int, Bitmap]) -> dict[int, set[int]]:
        """By push, the chunks by their index in this process's share."""
        numbers = self.tensors.numbers_of(self.part)
        return {
            push: {own for own, number in enumerate(numbers) if number in chunks}
            for push, chunks in settled.items()
        }

    @property
    def saved_feedback(self) -> SavedFeedback | None:
        """For a checkpoint; None where nothing was quantized."""
        feedback = self.feedback
        if not feedback.is_used:
            return None
        dropped = {push: feedback.flat(gains) for push, gains in feedback.dropped.items()}
        return SavedFeedback(feedback.flat(feedback.chunks), dropped)

    def _at_freeze(self) -> FlatState:
        """The model's values at the freeze of the in-flight push."""
        delta = self.delta
        assert delta is not None
        if delta.frozen is not None:
            return delta.frozen
        if delta.anchor is not None and not overlaps(self.config):
            return delta.anchor
        return delta.wire.taken_from(self.base)
