"""One fragment between the model and the link: freezing a delta, keeping its reply, merging it.

The values have these names: *base* is the version that the delta is measured from; a *flight* is a
frozen delta under way; its *reply* is a version that contains it. Training may go on in between (tau
steps in Streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512), so up to two more copies of the
fragment are kept with a flight, each only where it is needed:

- *frozen*, the model at the freeze, for the merge "rebase": local <- new + (local - frozen);
- its *anchor*, the model when training ceased to wait for the flight: the steps after that are kept
  whole, on top of the merge as it would have been then.

A *landing* brings the model in line with what has become of a flight. It may be broken off: nothing is
forgotten and the base stays what it was until the model is whole, and the next look goes on with it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from enum import Enum

from diloco_protocol import Ledger, RunConfig, Segment, VersionId
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.fragments.plan import longest_delay
from diloco_protocol.messages import BUFFERS, Push
from diloco_worker.core.sync.news import Arrival, Rejection
from diloco_worker.model.flat_state import FlatState, WireFragment
from diloco_worker.model.merging import Change
from diloco_worker.model.model_tensors import Delta, ModelTensors
from diloco_worker.shell.link import Link


class Outcome(str, Enum):
    """What a look at a fragment has brought."""

    NOTHING = "nothing"
    COUNTED = "counted"  # the flight is in the version that is the base now
    MOVED = "moved"  # there was no flight; a newer version is the base now
    REJECTED = "rejected"  # the flight has ended; the base is what it was
    SUPERSEDED = (
        "superseded"  # the base took the place of the steps in the model; no flight any more
    )
    RESTORED = "restored"  # the steps since the last freeze are out of the model
    LOADED = "loaded"  # a version is in the model as it is
    FAILED = "failed"  # the model could not be changed; the next look goes on with it


@dataclass(frozen=True)
class Merge:
    """How a reply comes into the model, and when; from the run's configuration.

    Attributes:
        rebases: "rebase" instead of the paper's "alpha".
        alpha: weight of the local values.
        delay: tau, steps from the freeze to the apply point.
        max_delay: steps from the freeze after which training waits for the reply; at least tau. None:
            what goes with H, see `diloco_protocol.fragments.plan.longest_delay`.
        is_auto: the apply point is when the reply is here, so none comes late before training waits.
        num_fragments: P.
    """

    rebases: bool = False
    alpha: float = 0.0
    delay: int = 0
    max_delay: int | None = 0
    is_auto: bool = False
    num_fragments: int = 1

    @classmethod
    def of(cls, config: RunConfig) -> Merge:
        tau, latest, is_auto = (
            config.fragment_sync_delay,
            config.fragment_max_delay,
            config.fragment_delay_auto,
        )
        if latest is None and not is_auto:
            latest = tau
        return cls(
            rebases=config.fragment_merge == "rebase",
            alpha=config.fragment_update_alpha,
            delay=tau,
            max_delay=None if latest is None else max(tau, latest),
            is_auto=is_auto,
            num_fragments=config.num_fragments,
        )

    @property
    def overlaps(self) -> bool:
        """Whether training may go on behind a freeze."""
        return self.max_delay != 0

    def longest(self, sync_every: int) -> int:
        """Steps from the freeze after which training waits for the reply, with this H."""
        if self.max_delay is not None:
            return self.max_delay
        return longest_delay(sync_every, self.num_fragments)


@dataclass(frozen=True)
class Work:
    """What a delta was made of: since the fragment's last freeze, and the latest loss."""

    steps: int = 0
    tokens: int = 0
    samples: int = 0
    loss: float | None = None


@dataclass
class Flight:
    """A frozen delta under way.

    Attributes:
        push: the offer: push id, the version it was computed from, what was done for it.
        began: the optimizer step behind which it was frozen.
        apply_at: the step behind which its reply is merged, not earlier.
        wait_at: the step behind which training waits for the reply.
        wire: the delta as it is sent.
        reconnections: of the link, when the flight began.
        let_go: training has ceased to wait for it.
        is_offered: the link has it.
        frozen, anchor: see the head of this module.
    """

    push: Push
    began: int
    apply_at: int
    wait_at: int
    wire: WireFragment
    reconnections: int = 0
    let_go: bool = False
    is_offered: bool = False
    frozen: FlatState | None = None
    anchor: FlatState | None = None

    @property
    def push_id(self) -> int:
        return self.push.push_id

    @property
    def base(self) -> VersionId:
        assert self.push.base is not None
        return self.push.base

    @property
    def steps(self) -> int:
        """Optimizer steps in it."""
        return self.push.steps


@dataclass(frozen=True)
class Ground:
    """What training of a fragment stands on: a checkpoint holds one of each fragment.

    Attributes:
        version, ledger: of the base, which is the version that the next delta is measured from.
        base: its values.
        work: since the fragment's last freeze.
        flight: the delta under way, if there is one.
    """

    version: VersionId
    ledger: Ledger
    base: FlatState
    work: Work
    flight: Flight | None


@dataclass(frozen=True)
class Landing:
    """What a look has brought, once the model is in line with it.

    Attributes:
        flight: the one that was under way.
        arrival: the version that has come.
        rejection: why the flight has ended without one.
        change: of the model; None where it is left as it is, on its base.
        is_load: a version was asked for, to be in the model as it is.
    """

    outcome: Outcome = Outcome.NOTHING
    flight: Flight | None = None
    arrival: Arrival | None = None
    rejection: Rejection | None = None
    change: Change | None = None
    is_load: bool = False


@dataclass(frozen=True)
class NonFinite:
    """The delta cannot be sent: this tensor, a parameter or a buffer, has NaN or infinity in it."""

    name: str
    is_buffer: bool = False


class FragmentExchange:
    """See the head of this module. Belongs to the training thread.

    Args:
        start: the version to begin with, which is put into the model; or what to go on from, where the
            model is as it was then.

    Attributes:
        reply: a version that has come and is not in the model yet.
        rejection: why the flight has ended without one.
        parting: a flight that has ended while the model was left as it is, on its base: a checkpoint
            written now goes on from there.
        staleness: versions between the last counted flight's base and the one it went into.
    """

    def __init__(
        self,
        part: FragmentLayout,
        tensors: ModelTensors,
        link: Link,
        start: Arrival | Ground,
        merge: Merge | None = None,
    ) -> None:
        self.part = part
        self.merge = merge or Merge()
        self.flight: Flight | None = None
        self.reply: Arrival | None = None
        self.rejection: Rejection | None = None
        self.parting: Flight | None = None
        self.staleness = 0
        self._landing: Landing | None = None
        self._tensors = tensors
        self._link = link
        self.version = start.version
        if isinstance(start, Ground):
            self.base, self.ledger, self.flight = start.base, start.ledger, start.flight
        else:
            assert start.values is not None
            tensors.put(start.values)
            self.base, self.ledger = start.values, start.released.ledger
        self._link.set_base(part.fragment, self.base)

    @property
    def fragment(self) -> int:
        return self.part.fragment

    def is_late(self, flight: Flight, step: int) -> bool:
        """Whether a merge behind this step comes after its time."""
        return step > (flight.wait_at if self.merge.is_auto else flight.apply_at)

    @property
    def is_over(self) -> bool:
        """The flight has ended; `settle` brings the model in line with it."""
        return self.flight is not None and (self.reply is not None or self.rejection is not None)

    @property
    def is_torn(self) -> bool:
        """A landing was broken off: a part of the model may be ahead of the rest."""
        return self._landing is not None

    def ground(self, work: Work) -> Ground:
        """What training stands on now, as far as it is in the model; shares memory with it."""
        return Ground(self.version, self.ledger, self.base, work, self.flight or self.parting)

    def freeze(self, dtype: str, step: int, work: Work, sync_every: int) -> Flight | NonFinite:
        """Freeze global minus local, to be offered; there is no flight if it is not finite.

        Args:
            dtype: that parameters travel in.
            step: the optimizer step that has just been taken.
            sync_every: H of the cycle at hand.
        """
        assert self.flight is None and self.reply is None, "no second delta grows over a first"
        merge = self.merge
        frozen = None
        if merge.rebases and merge.overlaps:
            frozen = self._tensors.capture(self.part)
            delta = self._tensors.encode(self.part, frozen.by_name(), dtype, self.base)
        else:
            delta = self._tensors.delta(self.base, dtype)
        if delta.bad is not None:
            buffers = (p.entry.name for p in self.part.places if p.segment is Segment.BUFFERS)
            return NonFinite(delta.bad, delta.bad in buffers)
        self.flight = Flight(
            self._push(dtype, delta, work),
            step,
            step + merge.delay,
            step + merge.longest(sync_every),
            delta.wire,
            self._link.reconnections,
            frozen=frozen,
        )
        return self.flight

    def offer(self) -> None:
        """Hand the flight to the link, unless it has it."""
        flight = self.flight
        if flight is not None and not flight.is_offered:
            self._link.offer(flight.push, flight.wire)
            flight.is_offered = True

    def _push(self, dtype: str, delta: Delta, work: Work) -> Push:
        return Push(
            session=b"",
            push_id=secrets.randbits(64),
            fragment=self.fragment,
            chunks=self.part.chunks,
            wire_dtype=dtype,
            base=self.version,
            steps=work.steps,
            tokens=work.tokens,
            samples=work.samples,
            loss=work.loss,
            norm=delta.norm,
            buffers=BUFFERS,
        )

    def train_on(self) -> None:
        """Training goes on with the delta in flight: remember where it ceased to wait."""
        flight = self.flight
        if flight is not None and not flight.let_go:
            if flight.frozen is None and flight.anchor is None:
                flight.anchor = self._tensors.capture(self.part)
            flight.let_go = True

    def wait_again(self, step: int, sync_every: int) -> None:
        """The flight counts as if it were frozen behind this step, as to when it is waited for."""
        assert self.flight is not None
        self.flight.let_go = False
        self.flight.wait_at = step + self.merge.longest(sync_every)
        self.flight.reconnections = self._link.reconnections

    def take_in(self, arrival: Arrival) -> None:
        """Keep a whole version until it is its time; forget one that lacks the flight."""
        flight, earlier = self.flight, self.reply
        if flight is None or flight.push_id in arrival.counted or arrival.superseding:
            self.reply = arrival.after(earlier)
        elif earlier is not None and arrival.values is not None:
            self.reply = arrival.after(earlier)  # it contains what the earlier one did

    def reject(self, rejection: Rejection) -> None:
        """The broker has ended the flight."""
        self.rejection = rejection

    def settle(self, step: int, *, now: bool = False, touch_model: bool = True) -> Landing:
        """Bring the model in line with what has come. Never waits.

        What it raises breaks the landing off; called again, it goes on with it before anything else.

        Args:
            step: the optimizer step that has just been taken.
            now: take a reply although its apply point has not come.
            touch_model: False leaves the model as it is, if it is whole; for the end of training.
        """
        if self._landing is None:
            self._landing = self._next_landing(step, now=now, touch_model=touch_model)
        landing = self._landing
        if landing is None:
            return Landing()
        if landing.change is not None:
            self._tensors.bring_in(landing.change)
        self._land(landing)
        self._landing = None
        return landing

    def _next_landing(self, step: int, *, now: bool, touch_model: bool) -> Landing | None:
        flight, reply = self.flight, self.reply
        if reply is not None and reply.superseding:
            change = Change(self._state(reply)) if touch_model else None
            return Landing(Outcome.SUPERSEDED, flight, reply, change=change)
        if flight is None:
            if reply is None or reply.version == self.version or not touch_model:
                self.reply = None
                return None
            change = Change(self._state(reply), origin=self.base)
            return Landing(Outcome.MOVED, arrival=reply, change=change)
        if reply is not None:
            if step < flight.apply_at and not now:
                return None
            change = self._merged(flight, self._state(reply), step) if touch_model else None
            return Landing(Outcome.COUNTED, flight, reply, change=change)
        if self.rejection is not None:
            change = self._taken_back(flight, step) if touch_model else None
            return Landing(Outcome.REJECTED, flight, rejection=self.rejection, change=change)
        return None

    def _land(self, landing: Landing) -> None:
        """The model is in line: let go of what the landing was made of. May be done again."""
        flight, arrival, change = landing.flight, landing.arrival, landing.change
        if landing.outcome is Outcome.RESTORED:
            if flight is not None and flight.anchor is not None and change is not None:
                flight.anchor = change.new
            return
        if landing.outcome is Outcome.LOADED and flight is not None:
            assert change is not None
            flight.let_go = True
            flight.anchor = flight.frozen = change.new
            return
        if landing.outcome is Outcome.COUNTED:
            assert flight is not None and arrival is not None
            apart = arrival.version.counter - 1 - flight.base.counter
            self.staleness = max(0, apart) if arrival.staleness is None else arrival.staleness
        if change is None and landing.outcome is not Outcome.SUPERSEDED:
            self.parting = flight
        elif change is not None and arrival is not None:
            self._stand_on(arrival, change.new)
        self.flight = self.rejection = None
        reply = self.reply
        # Else a newer one has come while the landing was broken off.
        if reply is not None and arrival is not None and reply.version == arrival.version:
            self.reply = None

    def _merged(self, flight: Flight, new: FlatState, step: int) -> Change:
        origin = flight.anchor
        if origin is None and not self.merge.overlaps and step != flight.began:
            origin = self._at_freeze(flight)  # waiting was interrupted, and training went on
        if self.merge.rebases and flight.frozen is not None:
            origin = flight.frozen
        return Change(new, 0.0 if self.merge.rebases else self.merge.alpha, origin)

    def _taken_back(self, flight: Flight, step: int) -> Change:
        """Take a delta that will never count out of the model; the steps made since stay."""
        return Change(self.base, origin=None if step == flight.began else self._at_freeze(flight))

    def restore(self) -> None:
        """Take every step since the last freeze out of the model: its values are of no use.

        The next look does it.
        """
        landing, flight = self._landing, self.flight
        if landing is not None and landing.change is not None:
            self._landing = replace(landing, change=Change(landing.change.new, is_void=True))
            return
        ground = self.base if flight is None else self._at_freeze(flight)
        self._landing = Landing(Outcome.RESTORED, flight, change=Change(ground, is_void=True))

    def load(self, arrival: Arrival) -> None:
        """Put a version into the model as it is; the next look does it. The model must not be torn.

        With a delta still in flight the base stays, and later steps will be rebased from here.
        """
        assert self._landing is None
        flight, change = self.flight, Change(self._state(arrival))
        outcome = Outcome.LOADED
        if arrival.superseding:
            outcome = Outcome.SUPERSEDED
        elif flight is not None and flight.push_id in arrival.counted:
            outcome = Outcome.COUNTED
        self._landing = Landing(outcome, flight, arrival, change=change, is_load=True)

    def _at_freeze(self, flight: Flight) -> FlatState:
        """The values that the flight left in the model."""
        if flight.frozen is not None:
            return flight.frozen
        if flight.anchor is not None and not self.merge.overlaps:
            return flight.anchor
        return flight.wire.taken_from(self.base)

    def _state(self, arrival: Arrival) -> FlatState:
        values: FlatState | None = arrival.values
        return self.base if values is None else values

    def _stand_on(self, arrival: Arrival, state: FlatState) -> None:
        """This version is the base now. Its former memory may be overwritten from here on."""
        self.base = state
        self.version, self.ledger = arrival.version, arrival.released.ledger
        self._link.set_base(self.fragment, state)
