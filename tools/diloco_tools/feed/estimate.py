"""Inner steps between two heartbeats, by a worker's own pace: an estimate, and marked as one. Pure.

A worker tells how far it is every 30 s, and when it trains on from a new version; a display that showed
no more would stand still in between. More heartbeats would cost the broker a message for each worker and
each look, whether anybody looks or not; the pace that the worker tells costs nothing.
"""

import math

from diloco_protocol.feed import Snapshot, Worker
from diloco_tools.feed.model import Freshness

MARK = "~"  # before a number that nobody has told
HEARTBEAT_S = 30.0  # between two heartbeats, unless the broker tolerates less than three of these
SLACK = 1.5  # intervals after which a worker is silent


def usual_silence_s(snapshot: Snapshot) -> float:
    """Seconds without a report that are nothing to wonder at."""
    tolerated = snapshot.liveness.heartbeat_timeout_s
    return SLACK * (min(HEARTBEAT_S, tolerated / 3) if tolerated else HEARTBEAT_S)


def inner_step_now(snapshot: Snapshot, worker: Worker, fresh: Freshness) -> int | None:
    """Steps since the last boundary by now, at most H; None where the report is all there is.

    That is so of a worker that does not train, is not well, has told no pace or no step since the broker
    last concluded one, or is silent beyond its usual interval, and while the feed is STALE.
    """
    age_s, pace = worker.inner_age_s, worker.steps_per_s
    if fresh is Freshness.STALE or worker.health != "ok" or worker.state != "training":
        return None
    if age_s is None or not 0 <= max(age_s, worker.beat_age_s) <= usual_silence_s(snapshot):
        return None
    if pace is None or not (math.isfinite(pace) and pace > 0 and age_s >= 0):
        return None
    steps = min(worker.inner_step + pace * age_s, worker.sync_every)
    return int(steps) if int(steps) > worker.inner_step else None
