"""What a snapshot of the feed makes of the metrics of `catalogue`. Pure: no socket, no clock.

Counters are totals since the broker's start; those of a worker go on over its restarts.

While the feed is STALE nobody knows how the run is, so all that a snapshot says is left out: an absent
series says "unknown", an old number lies. What is known without one stays: `diloco_feed_up` is 0.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from diloco_protocol.errors import Code
from diloco_protocol.feed import Snapshot, Totals, Worker
from diloco_tools.exporter import catalogue
from diloco_tools.exporter.catalogue import Metric, Of, Reading, Row
from diloco_tools.exporter.labels import label_value
from diloco_tools.feed.model import Freshness

STATES = ("training", "waiting", "paused", "stopping")
HEALTHS = ("ok", "slow", "stalled", "lost")
REASONS = tuple(code.value for code in Code)
OTHER = "other"  # for words of a newer broker: they cannot add label values
MOST_FRAGMENTS = 256  # that have series of their own

Places = Callable[[Iterable[str]], Mapping[str, str]]


@dataclass(frozen=True)
class Family:
    """A metric with its samples: label values in the order of `metric.labels`, and the value."""

    metric: Metric
    samples: tuple[tuple[tuple[str, ...], float], ...]


def families(reading: Reading, now: float, version: str, places: Places) -> list[Family]:
    """All metrics at `now` (seconds, the clock of the model); those without a sample are left out.

    `version` is that of the exporter. `places` tells which of the worker ids it is given have series
    of their own, and under which label.
    """
    model = reading.model
    fresh = model.freshness(now) is not Freshness.STALE
    found = [
        _family(catalogue.EXPORTER, ((label_value(version),), 1.0)),
        _family(catalogue.UP, ((), float(fresh))),
        _family(catalogue.HEALTHY, ((), float(model.verdict(now).healthy))),
        _family(catalogue.AGE, ((), model.age_s(now) if model.snapshot else None)),
        *_alone(catalogue.FEED, reading),
    ]
    if fresh and (snapshot := model.at(now)) is not None:
        found += _of_snapshot(snapshot)
        found += _of_workers(snapshot.workers, places)
    return [family for family in found if family.samples]


def _of_snapshot(snapshot: Snapshot) -> Iterable[Family]:
    optimizer = f"{snapshot.outer.optimizer} {snapshot.outer.variant or ''}".strip()
    about = (
        snapshot.run or "",
        snapshot.mode,
        optimizer,
        snapshot.wire_dtype,
        snapshot.reply_dtype,
    )
    yield _family(catalogue.BUILD, ((label_value(snapshot.version),), 1.0))
    yield _family(catalogue.RUN, (tuple(map(label_value, about)), 1.0))
    state = snapshot.state if snapshot.state in STATES else OTHER
    yield _family(catalogue.STATE, *(((each,), float(each == state)) for each in (*STATES, OTHER)))
    words = (
        snapshot.fragment_pattern or "",
        snapshot.fragment_merge,
        snapshot.asynchronous.staleness_weight if snapshot.asynchronous else "",
        snapshot.reducer.aggregate,
        snapshot.reducer.weight_by,
    )
    yield _family(catalogue.SETTINGS, (tuple(map(label_value, words)), 1.0))
    yield from _alone(catalogue.SNAPSHOT, snapshot)
    yield from _alone(catalogue.LIVENESS, snapshot.liveness)
    yield from _alone(catalogue.ASYNCHRONOUS, snapshot.asynchronous)
    yield from _alone(catalogue.LOOP, snapshot.loop)
    yield from _alone(catalogue.COUNTS, snapshot.counts)
    yield from _alone(catalogue.TOTALS, snapshot.totals)
    yield _family(catalogue.REFUSED, *(((code,), n) for code, n in _reasons(snapshot.totals)))
    yield from _alone(catalogue.OUTER, snapshot.outer)
    yield from _alone(catalogue.REDUCER, snapshot.reducer)
    yield from _alone(catalogue.MODEL, snapshot.model)
    yield from _alone(catalogue.CHECKPOINT, snapshot.checkpoint)
    has_rounds = snapshot.mode != "async"
    # Before the first round the feed has a round 0 in which nobody is expected.
    if has_rounds and (now := snapshot.round) and (now.number or now.expected):
        yield from _alone(catalogue.OPEN_ROUND, now)
    if last := snapshot.last_round:
        yield from _alone(catalogue.LAST_ROUND, last)
        yield _family(catalogue.DURATION, ((), last.seconds if has_rounds else None))
    fragments = {str(each.fragment): each for each in snapshot.fragments[:MOST_FRAGMENTS]}
    yield from _labelled(catalogue.FRAGMENT, fragments)


def _reasons(totals: Totals) -> Iterable[tuple[str, int]]:
    """Refused work by reason, also those without any: a rate needs a zero to start from."""
    counts = dict.fromkeys((*REASONS, OTHER), 0)
    for code, count in totals.refused.items():
        if isinstance(count, int):  # the feed leaves the values of a mapping unchecked
            counts[code if code in counts else OTHER] += count
    counts[OTHER] += max(0, totals.rejected - sum(counts.values()))  # of an older broker: all
    return counts.items()


def _of_workers(workers: Sequence[Worker], places: Places) -> Iterable[Family]:
    healths = dict.fromkeys((*HEALTHS, OTHER), 0)
    for worker in workers:
        healths[worker.health if worker.health in healths else OTHER] += 1
    given = places(worker.id for worker in workers)
    named = {given[worker.id]: worker for worker in workers if worker.id in given}
    yield _family(catalogue.BY_HEALTH, *(((word,), count) for word, count in healths.items()))
    yield _family(catalogue.WITHOUT_SERIES, ((), len(workers) - len(named)))
    yield from _labelled(catalogue.WORKER, named)


def _alone(rows: Iterable[Row[Of]], of: Of | None) -> Iterable[Family]:
    if of is None:
        return []
    return [_family(row.metric, ((), row.value(of))) for row in rows]


def _labelled(rows: Iterable[Row[Of]], of: Mapping[str, Of]) -> Iterable[Family]:
    return [
        _family(row.metric, *(((name,), row.value(each)) for name, each in of.items()))
        for row in rows
    ]


def _family(metric: Metric, *samples: tuple[tuple[str, ...], float | None]) -> Family:
    """Without what is not known, and without counters that no counter can be."""
    known = (
        (labels, float(value))
        for labels, value in samples
        if value is not None and (metric.kind != "counter" or (value >= 0 and math.isfinite(value)))
    )
    return Family(metric, tuple(known))
