"""One fragment between freezing a delta and merging its reply: arrivals, and how they are settled.

The *base* is the version that the next delta is measured from. An *in-flight push* is a frozen delta;
its *reply* is a version that contains it. Training may go on meanwhile (tau steps in Streaming DiLoCo,
Douillard et al. 2025, arXiv 2501.18512). A *merge* brings the model in line with the end of an
in-flight push. It may be interrupted: the base stays what it was until the model is complete, and the
next poll resumes the same merge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field, replace
from enum import Enum
from typing import Any

from diloco_protocol import Ledger, RunConfig, VersionId
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.dtypes import is_quantized
from diloco_protocol.fragments import longest_delay
from diloco_protocol.messages import Push
from diloco_protocol.version import ABSENT_REMEMBERED
from diloco_worker.session.news import Arrival, Rejection, Work
from diloco_worker.session.previous_incarnation import SENT_BEFORE, names_unknown_push

# Versions whose ledgers are searched for a dropped push: that of the round open at the time, and one
# before.
VERSIONS_LOOKED_AT = 2
# Until a version settles a dropped push, a copy of each chunk of it that may have counted is kept, in
# at most this many times the memory of the fragment; the oldest pushes are given up first, as if
# nothing of them had counted. Once suffices for a round: of pushes rejected in a row each has only
# chunks that the round lacks. Where the broker does not say which chunks may have counted, all are
# kept.
MOST_KEPT = 2


class Outcome(str, Enum):
    """The outcome of settling a fragment."""

    NOTHING = "nothing"
    COUNTED = "counted"  # the in-flight push is in the version that is the base now
    MOVED = "moved"  # there was no in-flight push; a newer version is the base now
    REJECTED = "rejected"  # the in-flight push ended; the base is unchanged
    SUPERSEDED = "superseded"  # the base replaced the steps and the in-flight push
    RESTORED = "restored"  # the steps since the last freeze are out of the model
    LOADED = "loaded"  # a version is in the model as it is
    FAILED = "failed"  # the model could not be changed; the next poll retries


def merge_steps(config: RunConfig, sync_every: int, frozen_at: int) -> tuple[int, int]:
    """When a delta that was frozen after step s is merged.

    After the first step t with s + tau <= t <= s + M after which its reply is complete; after step s +
    M training waits for the reply. tau is `fragment_sync_delay` and M `fragment_max_delay`, but never
    less than tau; without it M = tau, as in Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512,
    section 2.3). With the delay "auto" tau = 0 and M = H / P (`longest_delay`), with this worker's H =
    `sync_every`. So with tau = M = 0 the boundary waits at the freeze, as in DiLoCo.

    A push that training no longer waits for (`InFlight.is_detached`) is merged by the same rule. The
    ranks of one worker merge after the same step, since they see the same replies. How a reply is
    merged, with alpha or by rebasing, is in `sync.merge`.

    Returns:
        s + tau and s + M.
    """
    tau, latest = config.fragment_sync_delay, config.fragment_max_delay
    if latest is None and config.fragment_delay_auto:
        longest = longest_delay(sync_every, config.num_fragments)
    else:
        longest = max(tau, latest or 0)
    return frozen_at + tau, frozen_at + longest


def overlaps(config: RunConfig) -> bool:
    """Whether training may go on after a freeze."""
    _, longest = merge_steps(config, config.sync_every, 0)
    return longest > 0


@dataclass
class InFlight:
    """A frozen delta in flight; its values are with the tensors."""

    push: Push  # the offer: push id, the version it was computed from, and the work in it
    began: int  # the optimizer step after which it was frozen
    apply_at: int  # the first step after which its reply may be merged
    wait_at: int  # the step after which training waits for the reply
    reconnections: int = 0  # of the link, when it was offered first
    is_detached: bool = False  # training has ceased to wait for it
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

    def is_awaited(self, step: int) -> bool:
        """Whether training waits for its reply after this step."""
        return step >= self.wait_at and not self.is_detached


@dataclass(frozen=True)
class Dropped:
    """A quantized push that was dropped: chunks of it may have counted before."""

    push_id: int
    may_count: Bitmap  # its chunks that are looked for
    versions: int = 0  # that have come into the model since


@dataclass(eq=False)
class Merge:
    """A decision that is not yet applied to the model, or not to all of it."""

    outcome: Outcome
    in_flight: InFlight | None = None
    arrival: Arrival | None = None  # the version that arrived
    rejection: Rejection | None = None  # why the in-flight push has ended without one
    touches_model: bool = True  # False leaves the model as it is, on its base
    is_load: bool = False  # a version was asked for, to be in the model as it is
    is_void: bool = False  # discard local values, and steps made while it is interrupted
    # By push id, the chunks that the version contains; no other chunk of the push will count. Of the
    # in-flight push where it is counted, and of pushes dropped earlier.
    settled: Mapping[int, Bitmap] = field(default_factory=dict)
    # The chunks of the rejected push that may be in a version nevertheless; None without a rejection.
    may_count: Bitmap | None = None
    change: Any = None  # of the model, once it has begun; an interrupted one is resumed
    is_applied: bool = False  # the model is in line with it


@dataclass(frozen=True)
class TrainingBase:
    """The training state of a fragment, for a checkpoint."""

    version: VersionId  # of the base
    ledger: Ledger
    work: Work = field(default_factory=Work)  # since the fragment's last freeze
    in_flight: InFlight | None = None
    dropped: tuple[Dropped, ...] = ()


@dataclass(eq=False, repr=False)
class Fragment:
    """The state of one fragment; its tensors are in `sync.merge`."""

    number: int
    worker_id: str
    chunks: int
    base: InitVar[TrainingBase]
    done_before: Work  # up to its last freeze
    reply: Arrival | None = None  # a version that is not in the model yet
    rejection: Rejection | None = None  # why the in-flight push ended without one
    merge: Merge | None = None  # interrupted, or being applied
    # A push that ended while the model was left on its base, from which a checkpoint resumes.
    parting: InFlight | None = None
    staleness: int = 0  # versions between the last counted in-flight push's base and where it went
    zeros: int = 0  # pushes of zeros in a row
    logged_failure: str | None = None  # why the model could not take in a merge
    logged_deferral: tuple[int, int | None] | None = None  # push id and round

    def __post_init__(self, base: TrainingBase) -> None:
        self.version, self.ledger, self.in_flight = base.version, base.ledger, base.in_flight
        self.dropped = base.dropped

    def is_calm(self, step: int) -> bool:
        """Whether there is nothing to do after this step, unless something arrived."""
        if self.merge is not None or self.reply is not None or self.rejection is not None:
            return False
        push = self.in_flight
        return push is None or (push.is_offered and not push.is_awaited(step))

    @property
    def is_over(self) -> bool:
        """The in-flight push has ended, and is not merged yet."""
        return self.in_flight is not None and (self.reply is not None or self.rejection is not None)

    @property
    def is_partial(self) -> bool:
        """A merge was interrupted: a part of the model may be ahead of the rest."""
        return self.merge is not None

    def take_in(self, arrival: Arrival) -> None:
        """Keep a complete version until it is merged; ignore one that lacks the in-flight push."""
        in_flight, earlier = self.in_flight, self.reply
        if in_flight is None or in_flight.push_id in arrival.counted or arrival.superseding:
            self.reply = arrival.after(earlier)
        elif earlier is not None and arrival.values is not None:
            self.reply = arrival.after(earlier)  # it contains what the earlier one did

    def froze(self, in_flight: InFlight) -> None:
        """A delta was frozen."""
        assert self.in_flight is None and self.reply is None, "no second delta grows over a first"
        self.in_flight = in_flight

    def next_merge(self, step: int, *, now: bool = False, touch_model: bool = True) -> Merge | None:
        """The merge that is due after this step, first an interrupted one; None where none is.

        `now` takes a reply before its apply point. Without `touch_model`, for the end of training, the
        model is left as it is, if it is complete.
        """
        if self.merge is None:
            self.merge = self._next_merge(step, now=now, touch_model=touch_model)
        return self.merge

    def _next_merge(self, step: int, *, now: bool, touch_model: bool) -> Merge | None:
        in_flight, reply, rejection = self.in_flight, self.reply, self.rejection
        if reply is not None and reply.superseding:
            return Merge(Outcome.SUPERSEDED, in_flight, reply, touches_model=touch_model)
        if in_flight is None:
            if reply is None or reply.version == self.version or not touch_model:
                self.reply = None
                return None
            return Merge(Outcome.MOVED, arrival=reply, settled=self._settled(reply))
        if reply is not None:
            if not now and step < in_flight.apply_at:
                return None
            settled = self._settled(reply, in_flight)
            return Merge(
                Outcome.COUNTED, in_flight, reply, touches_model=touch_model, settled=settled
            )
        if rejection is not None:
            counted = rejection.counted
            may_count = Bitmap.full(self.chunks) if counted is None else counted
            return Merge(
                Outcome.REJECTED,
                in_flight,
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

    def _settled(self, arrival: Arrival, in_flight: InFlight | None = None) -> dict[int, Bitmap]:
        """The pushes that this version settles: dropped ones, and the in-flight push that it counts."""
        ledger = arrival.released.ledger
        found = {
            each.push_id: ledger.own_chunks(self.worker_id, each.push_id, self.chunks)
            for each in (*self.dropped, *(() if in_flight is None else (in_flight,)))
        }
        for each in self.dropped:
            if not found[each.push_id] and each.versions + 1 < VERSIONS_LOOKED_AT:
                del found[each.push_id]
        return found

    def _keep_dropped(self, merge: Merge) -> None:
        in_flight = merge.in_flight
        match merge.outcome:
            case Outcome.REJECTED if in_flight is not None and is_quantized(
                in_flight.push.wire_dtype
            ):
                kept = [each for each in self.dropped if each.push_id not in merge.settled]
                if merge.may_count:
                    kept.append(Dropped(in_flight.push_id, merge.may_count))
                self.dropped = tuple(kept)
            case Outcome.SUPERSEDED:
                self.dropped = ()
            case Outcome.COUNTED | Outcome.MOVED | Outcome.LOADED:
                self.dropped = tuple(
                    replace(each, versions=each.versions + 1)
                    for each in self.dropped
                    if each.push_id not in merge.settled
                )

    def has_not_begun(self) -> None:
        """The merge was interrupted before it touched the model, and is decided again.

        One that takes steps out of the model stays due: no message would ask for it again.
        """
        if self.merge is not None and not self.merge.is_void:
            self.merge = None

    def merged(self, merge: Merge) -> None:
        """The model is in line with it. May be called again."""
        in_flight, outcome = merge.in_flight, merge.outcome
        if outcome is Outcome.LOADED and in_flight is not None:
            in_flight.is_detached = True
        elif outcome is not Outcome.RESTORED:
            self._end(merge)
        self.merge = None

    def _end(self, merge: Merge) -> None:
        """End the flight of the delta; the version, if any, becomes the base."""
        in_flight, arrival = merge.in_flight, merge.arrival
        if merge.outcome is Outcome.COUNTED:
            assert in_flight is not None and arrival is not None
            apart = arrival.version.counter - 1 - in_flight.base.counter
            self.staleness = max(0, apart) if arrival.staleness is None else arrival.staleness
        if merge.touches_model:
            self._keep_dropped(merge)
            if arrival is not None:
                self.version, self.ledger = arrival.version, arrival.released.ledger
        elif merge.outcome is not Outcome.SUPERSEDED:
            self.parting = in_flight
        self.in_flight = self.rejection = None
        # Else a newer one arrived while the merge was interrupted.
        reply = self.reply
        if reply is not None and arrival is not None and reply.version == arrival.version:
            self.reply = None

    def restore(self) -> None:
        """Have the next merge take every step since the last freeze out of the model."""
        if self.merge is not None and self.merge.touches_model:
            self.merge = replace(self.merge, is_void=True)
        else:
            self.merge = Merge(Outcome.RESTORED, self.in_flight, is_void=True)

    def load(self, arrival: Arrival) -> None:
        """Have the next merge put a version into the model as it is. The model must be consistent.

        With a delta still in flight the base stays, and later steps will be rebased from here.
        """
        assert self.merge is None
        in_flight, outcome = self.in_flight, Outcome.LOADED
        if arrival.superseding:
            outcome = Outcome.SUPERSEDED
        elif in_flight is not None and in_flight.push_id in arrival.counted:
            outcome = Outcome.COUNTED
        # With a delta in flight, its version settles those before it.
        settled = {}
        if outcome is Outcome.COUNTED or in_flight is None:
            settled = self._settled(arrival, in_flight)
        self.merge = Merge(outcome, in_flight, arrival, is_load=True, settled=settled)


def known_pushes(worker_id: str, base: Fragment | TrainingBase) -> frozenset[int]:
    """The pushes of a worker that the checkpoint takes into account in this fragment."""
    known = {counted.push_id for counted in base.ledger.pushes.get(worker_id, ())}
    if base.in_flight is not None:
        known.add(base.in_flight.push_id)
    return frozenset(known)


def compared(worker_id: str, base: Fragment | TrainingBase, arrival: Arrival) -> Arrival | None:
    """What the broker's version means for a worker that resumes from a checkpoint.

    None where the model stays, with its base and its push; else a version that contains the push, or
    one that supersedes the model.
    """
    ledger = arrival.released.ledger
    if arrival.version == base.version:
        return None
    if arrival.version.run != base.version.run:
        return replace(arrival, superseding=f"the run is {arrival.version.run} now")
    if names_unknown_push(ledger, worker_id, known_pushes(worker_id, base)):
        return replace(arrival, superseding=SENT_BEFORE)
    if worker_id not in ledger.pushes and len(ledger.pushes) >= ABSENT_REMEMBERED:
        return replace(arrival, superseding="the broker no longer knows whether they were counted")
    in_flight = base.in_flight
    if in_flight is not None and ledger.names_whole(worker_id, in_flight.push_id):
        return replace(arrival, counted=frozenset({in_flight.push_id}))
    return None
