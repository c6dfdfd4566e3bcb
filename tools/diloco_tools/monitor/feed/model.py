"""A model of a broker's feed and run. Pure: time is an argument, in seconds of any monotonic clock.

`FeedModel` keeps the newest snapshot, and knows whether the feed is alive, the run healthy, snapshots
were missed, and the broker was restarted. Ages in a snapshot are durations measured by the broker; the
model adds the time since the snapshot arrived. The clocks of two hosts are never subtracted.
"""

import math
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from typing import Any, TypeVar

from diloco_protocol.feed import FeedError, FeedRefusedError, Snapshot, Worker
from diloco_protocol.monitor.fields import BAD, GOOD, UNEASY
from diloco_protocol.monitor.rows import Listed
from diloco_protocol.monitor.verdict import Verdict, verdict_on
from diloco_tools.monitor.feed.series import Rate

T = TypeVar("T")

LIVE_BELOW_S = 3.0  # two lost snapshots, of one a second, do not show
STALE_ABOVE_S = 10.0  # the broker or the network is down: the display is outdated
AGES = {
    "age_s",
    "beat_age_s",
    "sync_age_s",
    "inner_age_s",
    "paused_for_s",
    "heard_age_s",
    "silent_s",
}
SCALARS = frozenset({str, int, float, bool})
HEARTBEAT_S = (
    30.0  # between two heartbeats, if the broker's timeout is three times as long or longer
)
SLACK = 1.5  # heartbeat intervals after which a worker is silent


class Freshness(Enum):
    """The freshness of a feed; values are tones of displays."""

    LIVE = GOOD
    LATE = UNEASY
    STALE = BAD


@dataclass
class FeedModel:
    """The newest snapshot and the state of the feed itself."""

    snapshot: Snapshot | None = None
    received_at: float = -math.inf
    missed: int = 0  # snapshots that were published and never arrived
    restarts: int = 0  # of the broker
    refusal: str = ""  # why the broker rejects us, a sentence; empty if it does not

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
        """Take an error of the feed."""
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
        """The newest snapshot with its ages advanced to `now`.

        `uptime_s` stays, since a silent broker may be down.
        """
        snapshot = self.snapshot
        return None if snapshot is None else _older(snapshot, self.age_s(now))

    def verdict(self, now: float) -> Verdict:
        """The verdict on the run, with reasons of feed, broker, round, then workers by id."""
        snapshot = self.at(now)
        if snapshot is None:
            return Verdict((self.refusal or "no snapshot has arrived yet",), "degraded")
        reasons = [self.refusal] if self.refusal else []
        if self.freshness(now) is Freshness.STALE:
            reasons.append(f"the broker has sent nothing for {self.age_s(now):.0f} s")
        return verdict_on(snapshot, reasons)


def _older(record: T, more: float) -> T:
    """The record with `more` seconds added to each known age in it and in its nested records."""
    changed: dict[str, Any] = {}
    for name, value in vars(record).items():
        if value is None or (type(value) in SCALARS and name not in AGES):  # most are
            continue
        if name in AGES:
            changed[name] = value + more
        elif is_dataclass(value):
            changed[name] = _older(value, more)
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            changed[name] = tuple(_older(each, more) for each in value)
    return replace(record, **changed) if changed else record  # type: ignore[type-var]


def listed(
    snapshot: Snapshot, worker: Worker, fresh: Freshness | None, rate: Rate | None
) -> Listed:
    """A worker with its estimated and computed figures; `fresh` None: the snapshot is recorded."""
    inner = None if fresh is None else inner_step_now(snapshot, worker, fresh)
    return Listed(worker, inner, *((rate.up, rate.down) if rate else ()))


def inner_step_now(snapshot: Snapshot, worker: Worker, fresh: Freshness) -> int | None:
    """Estimate the steps since the last boundary, at most H, by the reported pace.

    A worker reports its steps every 30 s; the estimate keeps displays moving in between. None if the
    report itself is best: the worker is not training or not healthy, reported no pace or no step since
    the broker inferred one, or is silent beyond its usual interval; or the feed is STALE.
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
