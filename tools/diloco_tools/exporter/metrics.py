"""What prometheus_client is given at each scrape: the metrics of `catalogue`, from the newest snapshot.

Counters are totals since the broker's start; those of a worker go on over its restarts.

Every distinct label value is a time series that Prometheus keeps for weeks, and two series with the same
labels make it refuse the whole scrape. Worker ids are free text of the peers: labels made of them are
short, printable and bounded in number.

While the feed is STALE nobody knows how the run is, so all that a snapshot says is left out: an absent
series says "unknown", an old number lies. What is known without one stays: `diloco_feed_up` is 0.
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
from diloco_protocol.monitor.tree import without_relays
from diloco_tools.exporter.catalogue import LABELS, TABLES, Value
from diloco_tools.monitor.feed.listener import Reading

STATES = ("training", "waiting", "paused", "stopping")
HEALTHS = ("ok", "slow", "stalled", "lost", DEAD)
REASONS = tuple(code.value for code in Code)
ACTIONS = ("save_all", "stop_all")
OTHER = "other"  # for words of a newer broker: they cannot add label values
MOST_FRAGMENTS = 256  # that have series of their own
MOST_DATA_SETS = 64  # likewise; a broker has no more
LONGEST_VALUE = 64  # characters
HELD_S = 600.0  # a place is kept for a worker that is gone before another one gets it
Records = Mapping[tuple[str, ...], Any]  # by label values


def label_value(text: str) -> str:
    """`text` itself if it is short and printable, else its beginning and a digest of the whole."""
    clean = "".join(sign if sign.isprintable() else "?" for sign in text[:LONGEST_VALUE])
    if clean == text:
        return text
    digest = blake2s(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{clean[: LONGEST_VALUE - 9]}~{digest}"


class Places:
    """Which workers have series of their own: at most `most` at a time, the first to come.

    A worker keeps its place, and its label, while it is there. Once it is gone its place is held for
    ten minutes, so that workers that come and go under ever new names cannot fill Prometheus with
    series.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._labels: dict[str, str] = {}
        self._seen: dict[str, float] = {}

    def take(self, ids: Iterable[str], now: float) -> Mapping[str, str]:
        """Worker id -> label value, of those of `ids` that have a place at `now` (seconds)."""
        here = list(dict.fromkeys(ids))
        for gone in [name for name, seen in self._seen.items() if now - seen > HELD_S]:
            del self._seen[gone], self._labels[gone]
        for name in here:
            label = label_value(name)
            # Of two ids that look the same, one has series.
            is_free = len(self._labels) < self.most and label not in self._labels.values()
            if name in self._labels or is_free:
                self._labels[name] = label
                self._seen[name] = now
        return {name: self._labels[name] for name in here if name in self._labels}


class RunCollector:
    """Asks `read` what is known of the feed; at most `max_workers` have series of their own.

    `version` is that of the exporter.
    """

    def __init__(self, read: Callable[[], Reading], version: str, max_workers: int) -> None:
        self._read = read
        self._version = version
        self._places = Places(max_workers)
        self._one_at_a_time = threading.Lock()

    def collect(self) -> list[Metric]:
        """All metrics that have a sample now."""
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
        """All metrics that there can be: so a scrape may ask for some by `name[]`."""
        return _metrics({})


def _metrics(records: Mapping[str, Records]) -> list[Metric]:
    """Each without what is not known, and without counters that no counter can be."""
    found = []
    for table, rows in TABLES.items():
        for name, (attribute, text) in rows.items():
            metric = _named(f"diloco_{name}", text)
            for labels, record in records.get(table, {}).items():
                value = _value(record, attribute)
                if value is None or (metric.type == "counter" and not 0 <= value < math.inf):
                    continue
                named = dict(zip(LABELS.get(table, ()), labels, strict=True))
                metric.add_sample(f"diloco_{name}", named, float(value))
            found.append(metric)
    return found


def _value(record: Any, attribute: str | Value) -> float | None:
    """None also where a record on the way to the attribute is None."""
    if not isinstance(attribute, str):
        return attribute(record)
    for name in attribute.split("."):
        record = None if record is None else getattr(record, name)
    value: float | None = record
    return value


def _named(name: str, text: str) -> Metric:
    """A metric without a sample: its name tells the kind and, at its end, the base unit."""
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
    # Before the first round the feed has a round 0 in which nobody is expected.
    round_ = snapshot.round if snapshot.mode != "async" else None
    is_open = round_ is not None and bool(round_.number or round_.expected)
    return {
        "broker": {(label_value(snapshot.version),): 1},
        "run": {tuple(map(label_value, about)): 1},
        "settings": {tuple(map(label_value, words)): 1},
        "states": _by_word(STATES, {snapshot.state: 1}),
        "snapshot": {(): snapshot},
        "refused": _by_word(REASONS, _refused(snapshot.totals)),
        "round": {(): round_} if is_open else {},
        "fragments": {(str(f.fragment),): f for f in snapshot.fragments[:MOST_FRAGMENTS]},
        "orders": {(o.action if o.action in ACTIONS else OTHER,): o for o in snapshot.orders},
        "data_sets": {(label_value(d.name),): d for d in snapshot.data_sets[:MOST_DATA_SETS]},
    }


def _of_workers(snapshot: Snapshot, places: Places, now: float) -> dict[str, Records]:
    workers = snapshot.listed
    labels = places.take((worker.id for worker in workers), now)
    named: Records = {(labels[worker.id],): worker for worker in workers if worker.id in labels}
    return {
        "healths": _by_word(HEALTHS, Counter(each.health for each in without_relays(workers))),
        "without_series": {(): len(workers) - len(named)},
        "workers": named,
    }


def _refused(totals: Totals) -> Mapping[str, int]:
    """Refused work by reason; of an older broker, which tells no reasons, all as other."""
    # The feed leaves the values of a mapping unchecked.
    counts = Counter({code: n for code, n in totals.refused.items() if isinstance(n, int)})
    counts[OTHER] += max(0, totals.rejected - counts.total())
    return counts


def _by_word(known: tuple[str, ...], counts: Mapping[str, int]) -> Records:
    """The counts of the known words, also of those without any: a rate needs a zero to start from."""
    found: dict[tuple[str, ...], int] = dict.fromkeys(((word,) for word in (*known, OTHER)), 0)
    for word, count in counts.items():
        found[(word if word in known else OTHER,)] += count
    return found
