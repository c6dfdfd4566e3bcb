"""One fragment between the model and the link: freezing a delta, taking in a version, rebasing.

The values have these names: *base* is the version that the delta is measured from; a *flight* is a
frozen delta under way; its *anchor* is what the model was at the freeze, kept only when training goes on
while the delta is in flight.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum

from diloco_protocol import VersionId
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.messages import Push
from diloco_worker.link import Arrival, Link
from diloco_worker.snapshot import FlatState, ModelTensors


class Outcome(str, Enum):
    """What a look at the link has brought."""

    NOTHING = "nothing"
    COUNTED = "counted"  # the flight is in the version that is the base now
    MOVED = "moved"  # there was no flight; a newer version is the base now
    REJECTED = "rejected"  # the flight has ended; the base is what it was


@dataclass
class Flight:
    """A frozen delta under way.

    Attributes:
        steps: optimizer steps in it.
        base: the version it was computed from.
        anchor: the model at the freeze; None while training stands still for this flight.
        reconnections: of the link, when the flight began.
    """

    push_id: int
    steps: int
    base: VersionId
    reconnections: int
    anchor: FlatState | None = None


@dataclass(frozen=True)
class NonFinite:
    """The delta cannot be sent: this tensor has NaN or infinity in it."""

    name: str


class FragmentExchange:
    """See the head of this module. Belongs to the training thread.

    Args:
        arrival: the version to begin with; it is put into the model.
    """

    def __init__(
        self, part: FragmentLayout, tensors: ModelTensors, link: Link, arrival: Arrival
    ) -> None:
        assert arrival.state is not None
        self.part = part
        self.flight: Flight | None = None
        self.staleness = 0
        self._tensors = tensors
        self._link = link
        tensors.put(arrival.state)
        self.base = arrival.state
        self.version = arrival.version
        self._link.hold(part.fragment, arrival.version, arrival.released.ledger, arrival.state)

    def freeze(
        self, dtype: str, *, steps: int, tokens: int, loss: float | None
    ) -> Flight | NonFinite:
        """Freeze global minus local and hand it to the link; nothing is sent if it is not finite."""
        assert self.flight is None, "no second delta grows over a first"
        delta = self._tensors.delta(self.base, dtype)
        if delta.bad is not None:
            return NonFinite(delta.bad)
        push = Push(
            session=b"",
            push_id=secrets.randbits(64),
            fragment=self.part.fragment,
            chunks=self.part.chunks,
            wire_dtype=dtype,
            base=self.version,
            steps=steps,
            tokens=tokens,
            loss=loss,
            norm=delta.norm,
        )
        self.flight = Flight(push.push_id, steps, self.version, self._link.reconnections)
        self._link.offer(push, delta.wire)
        return self.flight

    def train_on(self) -> None:
        """Training goes on with the delta in flight: remember where it was frozen."""
        if self.flight is not None and self.flight.anchor is None:
            self.flight.anchor = self._tensors.capture(self.part)

    def settle(self, *, touch_model: bool = True) -> Outcome:
        """Look whether something has come, and bring the model in line with it. Never waits.

        Args:
            touch_model: False leaves the model as it is; for the end of training.
        """
        flight = self.flight
        arrival = self._link.take(self.part.fragment)
        if arrival is not None:
            state = self._state(arrival)
            if flight is None:
                if arrival.version != self.version and touch_model:
                    self._tensors.rebase(state, self.base)
                    self._stand_on(arrival, state)
                    return Outcome.MOVED
            elif flight.push_id in arrival.counted:
                self._land(arrival)
                if touch_model and flight.anchor is None:
                    self._tensors.put(state)
                elif touch_model and flight.anchor is not None:
                    self._tensors.rebase(state, flight.anchor)
                self._stand_on(arrival, state)
                return Outcome.COUNTED
        if flight is not None and self._link.take_rejection(flight.push_id) is not None:
            self.flight = None
            if touch_model:
                self.drop(flight.anchor)
            return Outcome.REJECTED
        return Outcome.NOTHING

    def drop(self, anchor: FlatState | None) -> None:
        """Take a delta that will never count out of the model again; steps since `anchor` stay."""
        if anchor is None:
            self._tensors.put(self.base)
        else:
            self._tensors.rebase(self.base, anchor)

    def load(self, arrival: Arrival) -> bool:
        """Put a version into the model as it is. Returns whether it contains the flight.

        With a delta still in flight the base stays, and later steps will be rebased from here.
        """
        state = self._state(arrival)
        self._tensors.put(state)
        flight = self.flight
        if flight is not None and flight.push_id not in arrival.counted:
            flight.anchor = state
            return False
        if flight is not None:
            self._land(arrival)
        self._stand_on(arrival, state)
        return flight is not None

    def _land(self, arrival: Arrival) -> None:
        assert self.flight is not None
        self.staleness = max(0, arrival.version.counter - 1 - self.flight.base.counter)
        self.flight = None

    def _state(self, arrival: Arrival) -> FlatState:
        return self.base if arrival.state is None else arrival.state

    def _stand_on(self, arrival: Arrival, state: FlatState) -> None:
        """This version is the base now. Its former memory may be overwritten from here on."""
        fresh = state is not self.base
        self.base = state
        self.version = arrival.version
        self._link.hold(
            self.part.fragment, arrival.version, arrival.released.ledger, state if fresh else None
        )
