"""One fragment between freezing a delta and merging its reply: what has come, and what becomes of it.

The *base* is the version that the next delta is measured from. A *flight* is a frozen delta under way;
its *reply* is a version that contains it. Training may go on in between (tau steps in Streaming DiLoCo,
Douillard et al. 2025, arXiv 2501.18512). A *landing* brings the model in line with what has become of a
flight. Whoever carries it out may be interrupted: nothing is forgotten and the base stays what it was
until the model is whole, and the next look goes on with the same landing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field, replace
from enum import Enum

from diloco_protocol import Ledger, RunConfig, VersionId
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.dtypes import in_few_bits
from diloco_protocol.fragments import longest_delay
from diloco_protocol.messages import Push
from diloco_worker.session.news import Arrival, Rejection, Work

# A push that was dropped is looked for in the ledgers of so many versions: the one of the round that was
# open then, and one that may have been here before it.
VERSIONS_LOOKED_AT = 2
# Until a version settles a dropped push, a copy of each chunk of it that may have counted is kept. The
# copies take at most this many times the memory of the fragment; the oldest pushes are given up first,
# as if nothing of them had counted. Once is enough for a round: of pushes that are refused one after
# another each brings only chunks that the round lacks. Where the broker does not say which chunks may
# have counted, every one is kept.
MOST_KEPT = 2


class Outcome(str, Enum):
    """What a look at a fragment has brought."""

    NOTHING = "nothing"
    COUNTED = "counted"  # the flight is in the version that is the base now
    MOVED = "moved"  # there was no flight; a newer version is the base now
    REJECTED = "rejected"  # the flight has ended; the base is what it was
    SUPERSEDED = "superseded"  # the base took the place of the steps and of the flight
    RESTORED = "restored"  # the steps since the last freeze are out of the model
    LOADED = "loaded"  # a version is in the model as it is
    FAILED = "failed"  # the model could not be changed; the next look goes on with it


class Action(Enum):
    """What training does about an in-flight push after an optimizer step."""

    GO_ON = "go on"
    MERGE = "merge"  # the reply is here, and it is time
    WAIT = "wait"  # the reply is not here, and training stands still until it is


def merge_steps(config: RunConfig, sync_every: int, frozen_at: int) -> tuple[int, int]:
    """When a delta that was frozen after step s is merged.

    After the first step t with s + tau <= t <= s + M after which its reply is complete; after step s + M
    training waits for the reply. tau is `fragment_sync_delay` and M `fragment_max_delay`, but never less
    than tau; without it M = tau, as in Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512,
    section 2.3). With the delay "auto" tau = 0 and M = H / P (`longest_delay`), with this worker's
    H = `sync_every`. So with tau = M = 0 the boundary waits at the freeze, as in DiLoCo.

    A flight that training has ceased to wait for (`Flight.let_go`) is merged by the same rule, and
    waited for no more. Several ranks that are one worker merge at the same step, since they see the
    same replies. How a reply is merged, with alpha or by rebasing, is in `sync.merge`.

    Returns:
        s + tau and s + M.
    """
    tau, latest = config.fragment_sync_delay, config.fragment_max_delay
    if latest is None and config.fragment_delay_auto:
        longest = longest_delay(sync_every, config.num_fragments)
    else:
        longest = max(tau, latest or 0)
    return frozen_at + tau, frozen_at + longest


def next_action(flight: Flight, step: int, *, has_reply: bool = False) -> Action:
    """What training does about a flight after this step, by the rule of `merge_steps`."""
    if has_reply:
        return Action.MERGE if step >= flight.apply_at else Action.GO_ON
    return Action.WAIT if step >= flight.wait_at and not flight.let_go else Action.GO_ON


def overlaps(config: RunConfig) -> bool:
    """Whether training may go on after a freeze."""
    _, longest = merge_steps(config, config.sync_every, 0)
    return longest > 0


@dataclass
class Flight:
    """A frozen delta under way; its values are with the tensors."""

    push: Push  # the offer: push id, the version it was computed from, what was done for it
    began: int  # the optimizer step behind which it was frozen
    apply_at: int  # the step behind which its reply is merged, not earlier
    wait_at: int  # the step behind which training waits for the reply
    reconnections: int = 0  # of the link, when the flight began
    let_go: bool = False  # training has ceased to wait for it
    is_offered: bool = False  # the link has it

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
class Dropped:
    """A push in few bits that was dropped: chunks of it may have counted before that."""

    push_id: int
    may_count: Bitmap  # its chunks that are looked for
    versions: int = 0  # that have come into the model since


@dataclass(frozen=True, eq=False)
class Landing:
    """What a look has brought. Not in the model before somebody has brought it there."""

    outcome: Outcome
    flight: Flight | None = None  # the one that was under way
    arrival: Arrival | None = None  # the version that has come
    rejection: Rejection | None = None  # why the flight has ended without one
    touches_model: bool = True  # False leaves the model as it is, on its base
    is_load: bool = False  # a version was asked for, to be in the model as it is
    is_void: bool = False  # local values are of no use: steps made while it is broken off go too
    # By push id, the chunks of a push that the version contains; no other chunk of it will count. Of the
    # flight where it is counted, and of pushes that were dropped earlier.
    settled: Mapping[int, Bitmap] = field(default_factory=dict)
    # The chunks of the rejected flight that may be in a version all the same; None without a rejection.
    may_count: Bitmap | None = None


@dataclass(frozen=True)
class TrainingBase:
    """What training of a fragment stands on: a checkpoint holds one of each fragment."""

    version: VersionId  # of the base
    ledger: Ledger
    work: Work = field(default_factory=Work)  # since the fragment's last freeze
    flight: Flight | None = None
    dropped: tuple[Dropped, ...] = ()


@dataclass(eq=False, repr=False)
class Fragment:
    """See the head of this module."""

    number: int
    worker_id: str
    chunks: int
    base: InitVar[TrainingBase]  # what training stands on
    done_before: Work  # up to its last freeze
    reply: Arrival | None = None  # a version that has come and is not in the model yet
    rejection: Rejection | None = None  # why the flight has ended without one
    landing: Landing | None = None  # was broken off, or is being carried out
    # A flight that has ended while the model was left as it is, on its base: a checkpoint written now
    # goes on from there.
    parting: Flight | None = None
    staleness: int = 0  # versions between the last counted flight's base and where it went
    zeros: int = 0  # pushes of zeros in a row
    told_failure: str | None = None  # why the model could not take in a landing
    told_carried: tuple[int, int | None] | None = None  # push id and round

    def __post_init__(self, base: TrainingBase) -> None:
        self.version, self.ledger, self.flight = base.version, base.ledger, base.flight
        self.dropped = base.dropped

    @property
    def is_over(self) -> bool:
        """The flight has ended; a landing brings the model in line with it."""
        return self.flight is not None and (self.reply is not None or self.rejection is not None)

    @property
    def is_torn(self) -> bool:
        """A landing was broken off: a part of the model may be ahead of the rest."""
        return self.landing is not None

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
        """What is to be done about the model behind this step; first what was broken off. None: nothing.

        `now` takes a reply although its apply point has not come. Without `touch_model`, for the end of
        training, the model is left as it is, if it is whole.
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
            return Landing(Outcome.MOVED, arrival=reply, settled=self._settled(reply))
        if reply is not None:
            if not now and next_action(flight, step, has_reply=True) is not Action.MERGE:
                return None
            settled = self._settled(reply, flight)
            return Landing(
                Outcome.COUNTED, flight, reply, touches_model=touch_model, settled=settled
            )
        if rejection is not None:
            counted = rejection.counted
            may_count = Bitmap.full(self.chunks) if counted is None else counted
            return Landing(
                Outcome.REJECTED,
                flight,
                rejection=rejection,
                touches_model=touch_model,
                settled={
                    each.push_id: Bitmap(self.chunks) for each in self._given_up(len(may_count))
                },
                may_count=may_count,
            )
        return None

    def _given_up(self, more: int) -> Iterator[Dropped]:
        """The oldest dropped pushes, which are given up to track `more` further chunks."""
        kept = more + sum(len(each.may_count) for each in self.dropped)
        for each in self.dropped:
            if kept <= MOST_KEPT * self.chunks:
                return
            kept -= len(each.may_count)
            yield each

    def _settled(self, arrival: Arrival, flight: Flight | None = None) -> dict[int, Bitmap]:
        """The pushes that this version settles: dropped ones, and the flight that it counts."""
        ledger = arrival.released.ledger
        found = {
            each.push_id: ledger.own_chunks(self.worker_id, each.push_id, self.chunks)
            for each in (*self.dropped, *(() if flight is None else (flight,)))
        }
        for each in self.dropped:
            if not found[each.push_id] and each.versions + 1 < VERSIONS_LOOKED_AT:
                del found[each.push_id]
        return found

    def _keep_dropped(self, landing: Landing) -> None:
        flight = landing.flight
        match landing.outcome:
            case Outcome.REJECTED if flight is not None and in_few_bits(flight.push.wire_dtype):
                kept = [each for each in self.dropped if each.push_id not in landing.settled]
                if landing.may_count:
                    kept.append(Dropped(flight.push_id, landing.may_count))
                self.dropped = tuple(kept)
            case Outcome.SUPERSEDED:
                self.dropped = ()
            case Outcome.COUNTED | Outcome.MOVED | Outcome.LOADED:
                self.dropped = tuple(
                    replace(each, versions=each.versions + 1)
                    for each in self.dropped
                    if each.push_id not in landing.settled
                )

    def has_not_begun(self) -> None:
        """The landing was broken off before it touched the model, and is decided anew.

        One that takes steps out of the model follows from nothing that is here: it stays due.
        """
        if self.landing is not None and not self.landing.is_void:
            self.landing = None

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
            self._keep_dropped(landing)
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
        """Have the next landing take every step since the last freeze out of the model."""
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
        # With a delta in flight it is its version that tells of those before it.
        settled = {}
        if outcome is Outcome.COUNTED or flight is None:
            settled = self._settled(arrival, flight)
        self.landing = Landing(outcome, flight, arrival, is_load=True, settled=settled)
