"""One fragment between freezing a delta and merging its reply: what has come, and what becomes of it.

The *base* is the version that the next delta is measured from. A *flight* is a frozen delta under way;
its *reply* is a version that contains it. Training may go on in between (tau steps in Streaming DiLoCo,
Douillard et al. 2025, arXiv 2501.18512). A *landing* brings the model in line with what has become of a
flight. Whoever carries it out may be interrupted: nothing is forgotten and the base stays what it was
until the model is whole, and the next look goes on with the same landing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from diloco_protocol import Ledger, VersionId
from diloco_worker.core.sync.flights import Flight, Landing, Outcome
from diloco_worker.core.sync.news import Arrival, Rejection
from diloco_worker.core.sync.work import Work


@dataclass(frozen=True)
class TrainingBase:
    """What training of a fragment stands on: a checkpoint holds one of each fragment.

    Attributes:
        version, ledger: of the base, which is the version that the next delta is measured from.
        work: since the fragment's last freeze.
        flight: the delta under way, if there is one.
    """

    version: VersionId
    ledger: Ledger
    work: Work = field(default_factory=Work)
    flight: Flight | None = None


class Fragment:
    """See the head of this module.

    Attributes:
        number, chunks: of the fragment.
        version, ledger: of the base.
        flight: the delta under way.
        reply: a version that has come and is not in the model yet.
        rejection: why the flight has ended without one.
        landing: one that was broken off, or is being carried out.
        parting: a flight that has ended while the model was left as it is, on its base: a checkpoint
            written now goes on from there.
        staleness: versions between the last counted flight's base and the one it went into.
    """

    def __init__(self, number: int, chunks: int, base: TrainingBase) -> None:
        self.number = number
        self.chunks = chunks
        self.version, self.ledger = base.version, base.ledger
        self.flight = base.flight
        self.reply: Arrival | None = None
        self.rejection: Rejection | None = None
        self.landing: Landing | None = None
        self.parting: Flight | None = None
        self.staleness = 0

    @property
    def is_over(self) -> bool:
        """The flight has ended; a landing brings the model in line with it."""
        return self.flight is not None and (self.reply is not None or self.rejection is not None)

    @property
    def is_torn(self) -> bool:
        """A landing was broken off: a part of the model may be ahead of the rest."""
        return self.landing is not None

    def base(self, work: Work) -> TrainingBase:
        """What training stands on now, as far as it is in the model."""
        return TrainingBase(self.version, self.ledger, work, self.flight or self.parting)

    def take_in(self, arrival: Arrival) -> None:
        """Keep a whole version until it is its time; forget one that lacks the flight."""
        flight, earlier = self.flight, self.reply
        if flight is None or flight.push_id in arrival.counted or arrival.superseding:
            self.reply = arrival.after(earlier)
        elif earlier is not None and arrival.values is not None:
            self.reply = arrival.after(earlier)  # it contains what the earlier one did

    def take_off(self, flight: Flight) -> None:
        """A delta has been frozen."""
        assert self.flight is None and self.reply is None, "no second delta grows over a first"
        self.flight = flight

    def next_landing(
        self, step: int, *, now: bool = False, touch_model: bool = True
    ) -> Landing | None:
        """What is to be done about the model; first what was broken off. None: nothing.

        Args:
            step: the optimizer step that has just been taken.
            now: take a reply although its apply point has not come.
            touch_model: False leaves the model as it is, if it is whole; for the end of training.
        """
        if self.landing is None:
            self.landing = self._next_landing(step, now=now, touch_model=touch_model)
        return self.landing

    def _next_landing(self, step: int, *, now: bool, touch_model: bool) -> Landing | None:
        flight, reply, rejection = self.flight, self.reply, self.rejection
        if reply is not None and reply.superseding:
            return Landing(Outcome.SUPERSEDED, flight, reply, touches_model=touch_model)
        if flight is None:
            if reply is None or reply.version == self.version or not touch_model:
                self.reply = None
                return None
            return Landing(Outcome.MOVED, arrival=reply)
        if reply is not None:
            if step < flight.apply_at and not now:
                return None
            return Landing(Outcome.COUNTED, flight, reply, touches_model=touch_model)
        if rejection is not None:
            return Landing(Outcome.REJECTED, flight, rejection=rejection, touches_model=touch_model)
        return None

    def landed(self, landing: Landing) -> None:
        """The model is in line with it. May be said again."""
        flight, outcome = landing.flight, landing.outcome
        if outcome is Outcome.LOADED and flight is not None:
            flight.let_go = True
        elif outcome is not Outcome.RESTORED:
            self._end(landing)
        self.landing = None

    def _end(self, landing: Landing) -> None:
        """No delta is under way any more; the version that came, if any, is the base."""
        flight, arrival = landing.flight, landing.arrival
        if landing.outcome is Outcome.COUNTED:
            assert flight is not None and arrival is not None
            apart = arrival.version.counter - 1 - flight.base.counter
            self.staleness = max(0, apart) if arrival.staleness is None else arrival.staleness
        if landing.touches_model:
            if arrival is not None:
                self.version, self.ledger = arrival.version, arrival.released.ledger
        elif landing.outcome is not Outcome.SUPERSEDED:
            self.parting = flight
        self.flight = self.rejection = None
        # Else a newer one has come while the landing was broken off.
        reply = self.reply
        if reply is not None and arrival is not None and reply.version == arrival.version:
            self.reply = None

    def restore(self) -> None:
        """Take every step since the last freeze out of the model: its values are of no use.

        The next landing does it.
        """
        if self.landing is not None and self.landing.touches_model:
            self.landing = replace(self.landing, is_void=True)
        else:
            self.landing = Landing(Outcome.RESTORED, self.flight, is_void=True)

    def load(self, arrival: Arrival) -> None:
        """Put a version into the model as it is; the next landing does it. The model must not be torn.

        With a delta still in flight the base stays, and later steps will be rebased from here.
        """
        assert self.landing is None
        flight, outcome = self.flight, Outcome.LOADED
        if arrival.superseding:
            outcome = Outcome.SUPERSEDED
        elif flight is not None and flight.push_id in arrival.counted:
            outcome = Outcome.COUNTED
        self.landing = Landing(outcome, flight, arrival, is_load=True)
