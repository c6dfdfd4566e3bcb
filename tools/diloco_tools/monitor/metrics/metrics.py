"""The metrics of a scrape: the fields of the catalogue that have a metric.

A metric's name determines its type: a counter ends in `_total`, an info in `_info`, others are gauges.
Counters are totals since the broker's start; those of a worker continue over its restarts.

Prometheus keeps every distinct label value for weeks as a time series, and rejects a scrape with two
identical series. Worker ids are arbitrary text, so labels made of them are short, printable and
bounded in number.

While the feed is STALE, `diloco_feed_up` is 0 and all metrics of the snapshot are absent.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2s
from typing import Any

from prometheus_client.core import Metric

from diloco_protocol.errors import Code
from diloco_protocol.feed import DEAD, Snapshot, Totals
from diloco_protocol.monitor import fields
from diloco_protocol.monitor.fields import Field
from diloco_tools.monitor.feed.listener import Reading

STATES = ("training", "waiting", "paused", "stopping")
HEALTHS = ("ok", "slow", "stalled", "lost", DEAD)
REASONS = tuple(code.value for code in Code)
ACTIONS = ("save_all", "stop_all")
OTHER = "other"  # for words of a newer broker, which must not add label values
MOST_FRAGMENTS = 256  # with series of their own
MOST_DATA_SETS = 64  # likewise; a broker has at most as many
MOST_RELAYS = 64
LONGEST_VALUE = 64  # characters
HELD_S = 600.0  # that the series of an absent worker are reserved
Records = Mapping[tuple[str, ...], Any]  # by label values


def _one(metric: str, help: str) -> tuple[Field, ...]:
    """A table of one metric; its records are the values."""
    return (Field("", "", help, metric=metric, measure=float),)


# Metrics of a `Reading` itself.
# fmt: off
OF_FEED = (
    Field("is_fresh", "", "1 if the broker was heard in the last 10 s, else 0.", metric="feed_up"),
    Field("model.verdict", "",
        "1 if the run is as it should be or has ended, 0 if not or if the broker is silent.",
        metric="run_healthy", measure=lambda of: of.model.verdict(of.now).healthy),
    Field("model.age_s", "", "Time since the newest snapshot came.", metric="feed_age_seconds",
        measure=lambda of: of.model.age_s(of.now) if of.model.snapshot else None),
    Field("received", "", "Snapshots that the exporter received.",
        metric="feed_snapshots_received_total"),
    Field("model.missed", "", "Snapshots that the broker sent and the exporter never received.",
        metric="feed_snapshots_missed_total"),
    Field("unreadable", "", "Frames that were no snapshot, or one of another feed version.",
        metric="feed_frames_unreadable_total"),
    Field("model.restarts", "", "Restarts of the broker that the exporter saw.",
        metric="broker_restarts_total"),
)
# fmt: on
# By table: the labels that distinguish its records, and its metrics.
TABLES: dict[str, tuple[tuple[str, ...], tuple[Field, ...]]] = {
    "exporter": (("version",), _one("exporter_build_info", "Version of the exporter.")),
    "feed": ((), OF_FEED),
    "broker": (("version",), _one("build_info", "Version of the broker.")),
    "run": (
        ("run", "mode", "optimizer", "wire_dtype", "reply_dtype"),
        _one("run_info", "The run and its setup."),
    ),
    "states": (("state",), _one("run_state", "1 for the state of the run, 0 for the others.")),
    "settings": (
        ("fragment_pattern", "fragment_merge", "staleness_weight", "aggregate", "weight_by"),
        _one("settings_info", "Settings of the run in words; empty where it has none."),
    ),
    "snapshot": ((), fields.OF_SNAPSHOT),
    "refused": (
        ("code",),
        _one("refused_pushes_total", "Work of workers that the broker rejected, by reason."),
    ),
    "fragments": (("fragment",), fields.OF_FRAGMENT),
    "orders": (("action",), fields.OF_ORDER),
    "data_sets": (("data_set",), fields.OF_DATA_SET),
    "relays": (("relay",), fields.OF_RELAY),
    "healths": (("health",), _one("workers", "Workers, by health, the dead included.")),
    "without_series": (
        (),
        _one(
            "workers_without_series",
            "Workers without series of their own: there are more than --max-workers.",
        ),
    ),
    "workers": (("worker",), fields.OF_WORKER),
}


def label_value(text: str) -> str:
    """`text` if it is short and printable, else its beginning and a digest of all of it."""
    clean = "".join(sign if sign.isprintable() else "?" for sign in text[:LONGEST_VALUE])
    if clean == text:
        return text
    digest = blake2s(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{clean[: LONGEST_VALUE - 9]}~{digest}"


class Places:
    """Assigns series to workers: at most `most` at a time, first come, first served.

    A present worker keeps its label. The place of an absent one is reserved for `HELD_S`, so workers
    with ever new names cannot fill Prometheus with series.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._labels: dict[str, str] = {}
        self._seen: dict[str, float] = {}

    def take(self, ids: Iterable[str], now: float) -> Mapping[str, str]:
        """Worker id -> label value for the `ids` that have a place at `now` (seconds)."""
        here = list(dict.fromkeys(ids))
        for gone in [name for name, seen in self._seen.items() if now - seen > HELD_S]:
            del self._seen[gone], self._labels[gone]
        for name in here:
            label = label_value(name)
            # Of two ids with the same label, one has series.
            is_free = len(self._labels) < self.most and label not in self._labels.values()
            if name in self._labels or is_free:
                self._labels[name] = label
                self._seen[name] = now
        return {name: self._labels[name] for name in here if name in self._labels}


class RunCollector:
    """Collects the metrics of `read()`, with series for at most `max_workers`; `version` is ours."""

    def __init__(self, read: Callable[[], Reading], version: str, max_workers: int) -> None:
        self._read = read
        self._version = version
        self._places = Places(max_workers)
        self._one_at_a_time = threading.Lock()

    def collect(self) -> list[Metric]:
        """The metrics that have samples now."""
        with self._one_at_a_time:
            reading = self._read()
            records: dict[str, Records] = {
                "exporter": {(label_value(self._version),): 1},
                "feed": {(): reading},
            }
            snapshot = reading.model.at(reading.now)
            if reading.is_fresh and snapshot is not None:
                records |= _of_run(snapshot) | _of_workers(snapshot, self._places, reading.now)
            return [metric for metric in _metrics(records) if metric.samples]

    def describe(self) -> list[Metric]:
        """All possible metrics, so that a scrape may select some by `name[]`."""
        return _metrics({})


def _metrics(records: Mapping[str, Records]) -> list[Metric]:
    """All metrics, without unknown values, and without invalid values of counters."""
    found = []
    for table, (labels, declared) in TABLES.items():
        for field in declared:
            if not field.metric:
                continue
            metric = _named(f"diloco_{field.metric}", field.help)
            for values, record in records.get(table, {}).items():
                value = field.measured(record)
                if value is None or (metric.type == "counter" and not 0 <= value < math.inf):
                    continue
                named = dict(zip(labels, values, strict=True))
                metric.add_sample(f"diloco_{field.metric}", named, value)
            found.append(metric)
    return found


def _named(name: str, text: str) -> Metric:
    """A metric without samples: its name determines its type and its base unit."""
    kinds = {"_total": "counter", "_info": "info"}
    suffix = next((suffix for suffix in kinds if name.endswith(suffix)), "")
    stem = name.removesuffix(suffix)
    unit = next((unit for unit in ("seconds", "bytes") if stem.endswith(f"_{unit}")), "")
    return Metric(stem, text, kinds.get(suffix, "gauge"), unit)


def _of_run(snapshot: Snapshot) -> dict[str, Records]:
    optimizer = f"{snapshot.outer.optimizer} {snapshot.outer.variant or ''}".strip()
    dtypes = (snapshot.wire_dtype, snapshot.reply_dtype)
    about = (snapshot.run or "", snapshot.mode, optimizer, *dtypes)
    words = (
        snapshot.fragment_pattern or "",
        snapshot.fragment_merge,
        snapshot.asynchronous.staleness_weight if snapshot.asynchronous else "",
        snapshot.reducer.aggregate,
        snapshot.reducer.weight_by,
    )
    return {
        "broker": {(label_value(snapshot.version),): 1},
        "run": {tuple(map(label_value, about)): 1},
        "settings": {tuple(map(label_value, words)): 1},
        "states": _by_word(STATES, {snapshot.state: 1}),
        "snapshot": {(): snapshot},
        "refused": _by_word(REASONS, _refused(snapshot.totals)),
        "fragments": {(str(f.fragment),): f for f in snapshot.fragments[:MOST_FRAGMENTS]},
        "orders": {(o.action if o.action in ACTIONS else OTHER,): o for o in snapshot.orders},
        "data_sets": {(label_value(d.name),): d for d in snapshot.data_sets[:MOST_DATA_SETS]},
        "relays": {(label_value(r.name),): r for r in snapshot.relays[:MOST_RELAYS]},
    }


def _of_workers(snapshot: Snapshot, places: Places, now: float) -> dict[str, Records]:
    workers = snapshot.listed
    labels = places.take((worker.id for worker in workers), now)
    named: Records = {(labels[worker.id],): worker for worker in workers if worker.id in labels}
    return {
        "healths": _by_word(HEALTHS, Counter(each.health for each in workers)),
        "without_series": {(): len(workers) - len(named)},
        "workers": named,
    }


def _refused(totals: Totals) -> Mapping[str, int]:
    """Rejected work by reason; work without a known reason counts as other."""
    counts = Counter(fields.refusals(totals))
    counts[OTHER] += max(0, totals.rejected - counts.total())
    return counts


def _by_word(known: tuple[str, ...], counts: Mapping[str, int]) -> Records:
    """The counts of all known words, zeros included: a rate needs a zero to start from."""
    found: dict[tuple[str, ...], int] = dict.fromkeys(((word,) for word in (*known, OTHER)), 0)
    for word, count in counts.items():
        found[(word if word in known else OTHER,)] += count
    return found
