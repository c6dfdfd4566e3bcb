"""What the page is sent: snapshots and figures over time as strict JSON. Pure.

Times leave here as seconds before the moment of sending, so the page adds what its own clock has
counted since; the clocks of two machines are never compared.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from diloco_protocol.feed import Snapshot
from diloco_tools.feed.series import RunSeries

# `raw` is the same again; `extra` is of any size, and nothing on the page shows it.
UNSENT = frozenset({"raw", "extra"})
SPEED_POINTS = 20_000  # of all workers in one message: some 500 kB
LEAST_SPEED_POINTS = 60  # of one worker


def encoded(value: object) -> str:
    """Strict JSON without spaces or line breaks: it fits into one line of an event stream."""
    return json.dumps(plain(value), allow_nan=False, separators=(",", ":"))


def plain(value: Any) -> Any:
    """Records as objects; a number that is not finite as null, since RFC 8259 has no other."""
    if is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in fields(value) if field.name not in UNSENT)
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def picture(snapshot: Snapshot, series: RunSeries) -> str:
    """The JSON of one snapshot, with the bytes a second of each worker."""
    rates = {worker.id: series.rate_of(worker.id) for worker in snapshot.workers}
    known = {name: (rate.up, rate.down) for name, rate in rates.items() if rate is not None}
    return encoded({"snapshot": snapshot, "rates": known})


def history(series: RunSeries, now: float, after: float) -> dict[str, Any]:
    """The points later than `after`, each beginning with its time relative to `now` in seconds.

    Returns:
        rounds: [t, number, seconds, averaged, loss, delta norm, staleness]
        network: [t, bytes a second up, down]
        speeds: worker id -> [t, steps a second]
    """
    each = max(LEAST_SPEED_POINTS, SPEED_POINTS // max(1, len(series.speeds)))
    speeds = {
        name: [(point[0] - now, point[1]) for point in points]
        for name, kept in series.speeds.items()
        if (points := thinned(_later([(at, (at, v)) for at, v in kept], after), each))
    }
    rounds = _later([(point.at, point) for point in series.rounds], after)
    network = _later([(rate.at, rate) for rate in series.network], after)
    return {
        "rounds": [
            (p.at - now, p.number, p.seconds, p.averaged, p.loss, p.delta_norm, p.staleness)
            for p in rounds
        ],
        "network": [(rate.at - now, rate.up, rate.down) for rate in network],
        "speeds": speeds,
    }


def _later(points: Sequence[tuple[float, Any]], after: float) -> list[Any]:
    """The values of those later than `after`; the newest are at the end, so it looks from there."""
    kept = []
    for at, value in reversed(points):
        if at <= after:
            break
        kept.append(value)
    return kept[::-1]


def thinned(points: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the points, evenly spread, the newest always among them."""
    if len(points) <= most:
        return list(points)
    stride = -(-len(points) // most)
    return list(points[(len(points) - 1) % stride :: stride])
