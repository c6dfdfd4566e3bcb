"""What the exporter makes of snapshots, and scrapes of it over HTTP read by prometheus_client itself."""

from __future__ import annotations

import gzip
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import parser as plain_parser
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser

from diloco_protocol.feed import parse_snapshot
from diloco_tools.exporter.catalogue import Reading
from diloco_tools.exporter.metrics import families
from diloco_tools.feed.model import FeedModel
from kit.feed_snapshots import PATIENCE_S, frame

HOSTILE = [
    'quote"d',
    "back\\slash",
    "two\nlines",
    "\r\n# EOF\ndiloco_feed_up 5",
    "x" * 10_000,
    "y" * 9_999,
    "größe-工作者-🦙",
    "\u202ereversed",
    "\x00\x1b[31m",
    "\ud800",
    "",
    " ",
    '{a="b"}',
]


def worker(name: str, **keys: Any) -> dict[str, Any]:
    return {
        "id": name,
        "state": "training",
        "health": "ok",
        "round": 411,
        "inner_step": 212,
        "sync_every": 250,
        "step": 205_712,
        "steps_per_s": 5.25,
        "loss": 2.5,
        "tokens": 420_000,
        "beat_age_s": 0.5,
        "sync_age_s": 12.5,
        "staleness": 1,
        "bytes_up": 38_000,
        "bytes_down": 76_000,
        "pushes": 410,
        "rejected": 2,
        **keys,
    }


def status(**keys: Any) -> dict[str, Any]:
    return {
        "feed": 1,
        "sequence": 7,
        "epoch": "ab12",
        "run": "3fa2c1d09b11",
        "version": "0.1.0",
        "uptime_s": 8000.0,
        "mode": "sync",
        "state": "training",
        "round": {
            "number": 412,
            "fragment": 1,
            "phase": "closing",
            "age_s": 12.25,
            "expected": ["a", "b", "c"],
            "arrived": ["a"],
            "missing": ["b", "c"],
            "floor": 2,
        },
        "counts": {"alive": 5, "participating": 4, "averaged": 3},
        "model": {"parameters": 1000, "tensors": 4, "bytes": 4000},
        "outer": {"optimizer": "dn", "lr": 0.75, "momentum": 0.5, "variant": "paper", "buffer": 4},
        "reducer": {"submissions": 6, "waiting": 2},
        "sync_every": 500,
        "wire_dtype": "bf16",
        "reply_dtype": "fp32",
        "workers_wanted": 2,
        "min_workers": 1,
        "fragment_pattern": "balanced",
        "fragment_sync_delay": 3,
        "fragment_max_delay": 9,
        "fragment_update_alpha": 0.25,
        "liveness": {
            "heartbeat_timeout_s": 90.0,
            "stall_timeout_s": 600.0,
            "disconnect_grace_s": 4.0,
        },
        "asynchronous": {
            "dylu": True,
            "dylu_min_steps": 8,
            "staleness_weight": "poly",
            "max_staleness": 6,
            "slots": 2,
        },
        "fragments": [
            {"fragment": 0, "version": 206, "buffered": 2, "contributions": 600},
            {"fragment": 1, "version": 205, "buffered": 1, "contributions": 597},
        ],
        "workers": [worker("a"), worker("b", health="lost"), worker("c", health="slow")],
        "totals": {
            "rounds": 411,
            "pushes": 1644,
            "contributions": 1640,
            "rejected": 6,
            "refused": {"stale": 4, "non_finite": 2},
            "malformed": 9,
            "bytes_up": 150_000,
            "bytes_down": 300_000,
            "deaths": 1,
        },
        "checkpoint": {"folder": "/runs/a", "round": 410, "age_s": 63.5, "error": None},
        "last_round": {
            "number": 411,
            "seconds": 41.25,
            "averaged": 3,
            "weight": 3.0,
            "loss": 2.375,
            "delta_norm": 0.0625,
            "staleness": 1,
        },
        "loop": {"longest_turn_ms": 4.5, "cpu_s": 312.5, "rss_bytes": 310_000_000},
        **keys,
    }


def everybody(ids: Iterable[str]) -> Mapping[str, str]:
    return {name: name for name in ids}


Samples = dict[tuple[str, tuple[str, ...]], float]


def exported(document: Any, later_s: float = 0.0, **keys: Any) -> Samples:
    """(name, label values) -> value, of one snapshot."""
    model = FeedModel()
    model.update(parse_snapshot(frame(document)), now=100.0)
    reading = Reading(model, **keys)
    return {
        (family.metric.name, labels): value
        for family in families(reading, 100.0 + later_s, "9.9", everybody)
        for labels, value in family.samples
    }


# What `promtool check metrics` says of names, written from its documentation.
BASE_UNITS = {"seconds", "bytes", "celsius", "meters", "grams", "joules", "volts", "amperes"}


OTHER_UNITS = {"minutes", "hours", "days", "weeks", "bits", "inches", "miles", "pounds", "calories"}


PREFIXES = ("pico", "nano", "micro", "milli", "centi", "deci", "deca", "hecto", "kilo", "kibi",
            "mega", "giga", "gibi", "tera", "tebi", "peta", "pebi")  # fmt: skip


ABBREVIATIONS = {"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d"}


TYPES = {"counter", "gauge", "histogram", "summary", "untyped", "info"}


def problems(name: str, kind: str, text: str, labels: Iterable[str] = ()) -> set[str]:
    """What is wrong with a metric as it is scraped in the text format."""
    words = name.split("_")
    found = set()
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        found.add("not snake case")
    if (kind == "counter") != name.endswith("_total"):
        found.add("_total is for counters, and each counter")
    if words[-1] in {"count", "sum", "bucket", "created"}:
        found.add("suffix of a histogram")
    for word in words:
        scaled = [word.removeprefix(prefix) for prefix in PREFIXES if word.startswith(prefix)]
        if word in OTHER_UNITS or set(scaled) & (BASE_UNITS | OTHER_UNITS):
            found.add("no base unit")
        if word in ABBREVIATIONS:
            found.add("abbreviated unit")
        if word in TYPES and not (word == "info" and word == words[-1]):
            found.add("its type in its name")
    units = [word for word in words if word in BASE_UNITS]
    if units and words[-1] != units[0] and words[-2:] != [units[0], "total"]:
        found.add("its unit is not at the end")
    if not text.strip():
        found.add("no help")
    for label in labels:
        if not re.fullmatch(r"[a-z][a-z_]*", label) or label in {"le", "quantile"}:
            found.add("bad label")
    return found


def parsed(text: str, openmetrics: bool = False) -> list[Metric]:
    parser: Any = openmetrics_parser if openmetrics else plain_parser
    return list(parser.text_string_to_metric_families(text))


def values(metrics: Iterable[Metric]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for metric in metrics:
        for sample in metric.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def fetch(url: str, **headers: str) -> tuple[str, str]:
    """Body and content type."""
    request = urllib.request.Request(
        url, headers={key.replace("_", "-"): value for key, value in headers.items()}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        body = reply.read()
        if reply.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        return body.decode(), reply.headers["Content-Type"]


def scrape(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return values(parsed(fetch(url)[0]))


def until(url: str, name: str, value: float) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Scrape until a metric without labels has that value."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = scrape(url)
        if found.get((name, frozenset())) == value:
            return found
        assert time.monotonic() < deadline, f"{name} is {found.get((name, frozenset()))}"
