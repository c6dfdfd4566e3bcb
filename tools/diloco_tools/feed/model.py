"""A pure model of how much to believe of a broker's feed, and of how its run is.

`FeedModel` keeps the newest snapshot and answers what every display asks: is the feed alive, is the run
healthy, were snapshots missed, is this still the same broker. There is no socket and no clock in here
(`diloco_tools.feed.listener` has the socket): time is an argument, in seconds of any monotonic clock.

Ages in a snapshot are durations measured by the broker. The model adds the time since the snapshot
arrived, measured by the caller; the clocks of two hosts are never subtracted.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from diloco_protocol.feed import (
    Checkpoint,
    Event,
    FeedError,
    FeedRefusedError,
    Parent,
    Rejection,
    Round,
    SiteAway,
    Snapshot,
    Worker,
)
from diloco_protocol.messages import Behind
from diloco_tools.feed import tree

LIVE_BELOW_S = 3.0  # two snapshots of one a second may be lost before it shows
STALE_ABOVE_S = 10.0  # the broker is gone, or the network is: nothing on the screen is news

HEARTBEAT_S = 30.0  # between two heartbeats, unless the broker tolerates less than three of these
SLACK = 1.5  # intervals after which a worker is silent


class Freshness(Enum):
    LIVE = "LIVE"
    LATE = "LATE"
    STALE = "STALE"


@dataclass(frozen=True)
class Verdict:
    """How the run is, with one sentence for each reason of any word but "healthy".

    `word` is "healthy"; "waiting" before the first round, as long as nothing is wrong; "ended" once
    all workers have left as done; else "degraded".
    """

    reasons: tuple[str, ...] = ()
    word: str = "healthy"

    @property
    def healthy(self) -> bool:
        """Nothing is wrong, and nothing has to happen before training goes on."""
        return self.word in ("healthy", "ended")


@dataclass
class FeedModel:
    """The newest snapshot and what is known about the feed itself."""

    snapshot: Snapshot | None = None
    received_at: float = -math.inf
    missed: int = 0  # snapshots of the running broker that never arrived
    restarts: int = 0  # how often another life of the broker took over
    refusal: str = ""  # why the broker does not let us in, a sentence; empty once it does

    def update(self, snapshot: Snapshot, now: float) -> bool:
        """Take a snapshot received at `now` (seconds). False if it is not newer than the last."""
        self.refusal = ""
        last = self.snapshot
        if last is not None and last.epoch == snapshot.epoch:
            if snapshot.sequence <= last.sequence:
                return False
            self.missed += snapshot.sequence - last.sequence - 1
        elif last is not None:
            self.restarts += 1
        self.snapshot = snapshot
        self.received_at = now
        return True

    def cannot_read(self, error: FeedError) -> None:
        """Take what came instead of a snapshot."""
        if isinstance(error, FeedRefusedError):
            self.refusal = str(error)

    def age_s(self, now: float) -> float:
        """Seconds since the newest snapshot arrived; infinite before the first."""
        return max(0.0, now - self.received_at)

    def freshness(self, now: float) -> Freshness:
        """LIVE under 3 s, LATE to 10 s, STALE after that and before the first snapshot."""
        age = self.age_s(now)
        if age < LIVE_BELOW_S:
            return Freshness.LIVE
        return Freshness.LATE if age <= STALE_ABOVE_S else Freshness.STALE

    def at(self, now: float) -> Snapshot | None:
        """The newest snapshot with the ages of its round, heartbeats and events counted on.

        `uptime_s` stays: nobody knows whether a broker that says nothing is still up.
        """
        snapshot = self.snapshot
        if snapshot is None:
            return None
        more = self.age_s(now)
        aged = replace(
            snapshot,
            round=snapshot.round and _older(snapshot.round, more),
            checkpoint=snapshot.checkpoint and _older(snapshot.checkpoint, more),
            workers=tuple(_older_worker(worker, more) for worker in snapshot.workers),
            sites_away=tuple(_older(away, more) for away in snapshot.sites_away),
            parent=snapshot.parent and _older(snapshot.parent, more),
            rejections=tuple(_older(rejection, more) for rejection in snapshot.rejections),
            events=tuple(_older(event, more) for event in snapshot.events),
        )
        return _older(aged, more)

    def verdict(self, now: float) -> Verdict:
        """How the run is, and the reasons: feed, broker, round, then workers by id."""
        snapshot = self.at(now)
        if snapshot is None:
            return Verdict((self.refusal or "no snapshot has arrived yet",), "degraded")
        reasons = [self.refusal] if self.refusal else []
        if self.freshness(now) is Freshness.STALE:
            reasons.append(f"the broker has sent nothing for {self.age_s(now):.0f} s")
        reasons += _broker_reasons(snapshot)
        reasons += [
            f"site {away.name} is missing, with {away.workers} "
            f"worker{'s'[: away.workers != 1]}, for {_seconds(away.away_s)}"
            for away in snapshot.sites_away
        ]
        for worker in tree.arranged(snapshot.workers, lambda w: w.id):
            if worker.health not in ("ok", tree.UNKNOWN):
                heard = f"last heard {_seconds(worker.beat_age_s)} ago"
                reasons.append(f"{worker.id} is {worker.health}, {heard}")
            if not worker.loss_is_finite or not math.isfinite(worker.loss or 0.0):
                reasons.append(f"the loss of {worker.id} is not finite")
        if not reasons:
            return Verdict((_ending(snapshot),), "ended") if snapshot.ended else Verdict()
        waits = reasons == _waiting(snapshot) and not _has_begun(snapshot)
        return Verdict(tuple(reasons), "waiting" if waits else "degraded")


Aging = TypeVar(
    "Aging", Snapshot, Round, Checkpoint, Worker, Behind, Parent, SiteAway, Rejection, Event
)
AGES = (
    "age_s",
    "beat_age_s",
    "sync_age_s",
    "inner_age_s",
    "paused_for_s",
    "lost_s",
    "offered_s",
    "away_s",
)


def _older(record: Aging, more: float) -> Aging:
    """The record with `more` seconds on each of its ages that is known."""
    known = {name: age for name in AGES if (age := getattr(record, name, None)) is not None}
    return replace(record, **{name: age + more for name, age in known.items()})


def _older_worker(worker: Worker, more: float) -> Worker:
    older = _older(worker, more)
    if worker.behind:
        older = replace(older, behind=tuple(_older(each, more) for each in worker.behind))
    return older


def _broker_reasons(snapshot: Snapshot) -> list[str]:
    floor = snapshot.round.floor if snapshot.round else 0
    saved, alive = snapshot.checkpoint, snapshot.counts.alive
    if snapshot.state == "stopping":
        return ["the broker is stopping"]
    if snapshot.state == "paused":
        return [f"the run is paused, for {_seconds(snapshot.paused_for_s or 0.0)}"]
    if saved is not None and saved.error is not None:
        return [f"no checkpoint can be written: {saved.error}"]
    if snapshot.state == "waiting":
        return [] if snapshot.ended else _waiting(snapshot)
    short = f"the run waits for workers: {alive} here, the round needs {floor}"
    return [short] if alive < floor else []


def _waiting(snapshot: Snapshot) -> list[str]:
    return [f"the run waits {snapshot.waiting_for or 'for workers'}"]


def _has_begun(snapshot: Snapshot) -> bool:
    """A version was made, or somebody who was to make one has died."""
    return any(part.version for part in snapshot.fragments) or snapshot.totals.deaths > 0


def _ending(snapshot: Snapshot) -> str:
    """Counts are of this life of the broker: one that was started again may have made no round."""
    count, one, many = snapshot.totals.rounds, "round", "rounds"
    if snapshot.mode == "async":
        count, one, many = snapshot.totals.contributions, "push", "pushes"
    after = f", after {count} {one if count == 1 else many}" if count else ""
    return f"all workers have left{after}"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def inner_step_now(snapshot: Snapshot, worker: Worker, fresh: Freshness) -> int | None:
    """Steps since the last boundary by now, at most H, by the worker's own pace: an estimate.

    A worker tells how far it is every 30 s, and a display that showed no more would stand still in
    between; the pace that it tells costs no further message. None where the report is all there is:
    the worker does not train, is not well, has told no pace or no step since the broker last concluded
    one, or is silent beyond its usual interval; or the feed is STALE.
    """
    age_s, pace = worker.inner_age_s, worker.steps_per_s
    tolerated = snapshot.liveness.heartbeat_timeout_s
    usual_silence_s = SLACK * (min(HEARTBEAT_S, tolerated / 3) if tolerated else HEARTBEAT_S)
    if fresh is Freshness.STALE or worker.health != "ok" or worker.state != "training":
        return None
    if age_s is None or age_s < 0 or not 0 <= max(age_s, worker.beat_age_s) <= usual_silence_s:
        return None
    if pace is None or not (math.isfinite(pace) and pace > 0):
        return None
    steps = min(worker.inner_step + pace * age_s, worker.sync_every)
    return int(steps) if int(steps) > worker.inner_step else None
