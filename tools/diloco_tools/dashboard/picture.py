"""What the page is sent: snapshots and figures over time as strict JSON. Pure.

Times leave here as seconds before the moment of sending, so the page adds what its own clock has
counted since; the clocks of two machines are never compared.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from diloco_protocol.feed import MAX_DEPTH, Snapshot, json_safe
from diloco_protocol.records import to_plain
from diloco_tools.feed.series import RunSeries

SPEED_POINTS = 20_000  # of all workers in one message: some 500 kB
LEAST_SPEED_POINTS = 60  # of one worker

P = TypeVar("P")


def encoded(value: object) -> str:
    """Strict JSON without spaces or line breaks: it fits into one line of an event stream."""
    plain = json_safe(to_plain(value, with_none=True), 2 * MAX_DEPTH)
    return json.dumps(plain, allow_nan=False, separators=(",", ":"))


def picture(snapshot: Snapshot, series: RunSeries) -> str:
    """The JSON of one snapshot, with the bytes a second of each worker."""
    plain = to_plain(snapshot, with_none=True)
    for worker in plain["workers"]:
        del worker["extra"]  # of any size, and nothing on the page shows it
    rates = {worker.id: series.rate_of(worker.id) for worker in snapshot.workers}
    known = {name: (rate.up, rate.down) for name, rate in rates.items() if rate is not None}
    return encoded({"snapshot": plain, "rates": known})


def history(series: RunSeries, now: float, after: float) -> dict[str, Any]:
    """The points later than `after`, each beginning with its time relative to `now` in seconds.

    Returns:
        rounds: [t, number, seconds, averaged, loss, delta norm, staleness]
        network: [t, bytes a second up, down]
        speeds: worker id -> [t, steps a second]
    """

    def later(points: Sequence[P], time_of: Callable[[P], float]) -> Sequence[P]:
        return points[bisect_right(points, after, key=time_of) :]

    each = max(LEAST_SPEED_POINTS, SPEED_POINTS // max(1, len(series.speeds)))
    speeds = {name: later(points, itemgetter(0)) for name, points in series.speeds.items()}
    return {
        "rounds": [
            (at - now, r.number, r.seconds, r.averaged, r.loss, r.delta_norm, r.staleness)
            for at, r in later(series.rounds, itemgetter(0))
        ],
        "network": [
            (rate.at - now, rate.up, rate.down) for rate in later(series.network, attrgetter("at"))
        ],
        "speeds": {
            name: [(at - now, speed) for at, speed in thinned(points, each)]
            for name, points in speeds.items()
            if points
        },
    }


def thinned(points: Sequence[P], most: int) -> Sequence[P]:
    """At most `most` of the points, evenly spread, the newest always among them."""
    stride = -(-len(points) // most) or 1
    return points[(len(points) - 1) % stride :: stride]
