"""What the exporter makes of snapshots, and scrapes of it over HTTP read by prometheus_client itself."""

import gzip
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import parser as plain_parser
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.registry import Collector

from diloco_protocol.feed import parse_snapshot
from diloco_tools.monitor.feed.listener import Reading
from diloco_tools.monitor.feed.model import FeedModel
from diloco_tools.monitor.metrics.metrics import TABLES, RunCollector
from diloco_tools.monitor.metrics.server import MetricsServer
from kit import feed_snapshots
from kit.feed_snapshots import PATIENCE_S, frame, worker

# Every metric by its full name, with its labels.
METRICS = {
    f"diloco_{field.metric}": labels
    for labels, declared in TABLES.values()
    for field in declared
    if field.metric
}
HOSTILE = [
    *('quote"d', "back\\slash", "two\nlines", "\r\n# EOF\ndiloco_feed_up 5", "x" * 10_000),
    *(
        "y" * 9_999,
        "größe-工作者-🦙",
        "\u202ereversed",
        "\x00\x1b[31m",
        "\ud800",
        "",
        " ",
        '{a="b"}',
    ),
]


def status(**keys: Any) -> dict[str, Any]:
    """A snapshot that has every figure of the exporter."""
    base = feed_snapshots.status()
    more = {
        "round": base["round"] | {"fragment": 1, "phase": "closing", "age_s": 12.25, "floor": 2},
        "outer": {"optimizer": "dn", "lr": 0.75, "momentum": 0.5, "variant": "paper", "buffer": 4},
        "reducer": {"submissions": 6, "waiting": 2},
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
        "workers": [
            worker("a", sync_every=250, sync_age_s=12.5, staleness=1, rejected=2),
            worker("b", health="lost"),
            worker("c", health="slow"),
        ],
        "totals": base["totals"] | {"contributions": 1640, "refused": {"stale": 4}},
        "end": {
            "max_rounds": 1000,
            "token_budget": 9_000_000,
            "max_time_s": 7200.0,
            "rounds": 411,
            "tokens": 840_000,
            "seconds": 3500,
        },
        "orders": [{"action": "save_all", "waiting": ["b"], "saved": 1, "left": 1}],
        "data_sets": [
            {
                "name": "text",
                "size": 100,
                "epochs": 3,
                "epoch": 1,
                "counted": 130,
                "held": 12,
                "given_back": 2,
            }
        ],
        "relays": [{"name": "north", "workers": 3, "held_bytes": 4096, "silent_s": 0.5}],
        "checkpoint": {"folder": "/runs/a", "round": 410, "age_s": 63.5, "error": None},
        "last_round": base["last_round"] | {"staleness": 1},
    }
    return base | more | keys


Samples = dict[tuple[str, tuple[str, ...]], float]


def samples(metrics: Iterable[Metric]) -> Samples:
    """(name, values of the labels by their names) -> value; each is there once."""
    found: Samples = {}
    for sample in (sample for metric in metrics for sample in metric.samples):
        key = (sample.name, tuple(value for _, value in sorted(sample.labels.items())))
        assert key not in found, f"twice: {key}"
        found[key] = sample.value
    return found


def collector(reading: Reading) -> RunCollector:
    """That of an exporter of version 9.9."""
    return RunCollector(lambda: reading, "9.9", 1000)


def reading(document: Any, later_s: float = 0.0, **counts: int) -> Reading:
    """What is known of a feed some time after its only snapshot came."""
    model = FeedModel()
    model.update(parse_snapshot(frame(document)), now=100.0)
    return Reading(model, 100.0 + later_s, **counts)


def exported(document: Any, later_s: float = 0.0, **counts: int) -> Samples:
    return samples(collector(reading(document, later_s, **counts)).collect())


def scraped(document: Any, **counts: int) -> str:
    """The same as Prometheus reads it."""
    registry = CollectorRegistry()
    registry.register(collector(reading(document, **counts)))
    return generate_latest(registry).decode()


def parsed(text: str, openmetrics: bool = False) -> list[Metric]:
    parser: Any = openmetrics_parser if openmetrics else plain_parser
    return list(parser.text_string_to_metric_families(text))


@contextmanager
def serving(collector: Collector, health: Callable[[], str | None] = lambda: None) -> Iterator[str]:
    """The address of its metrics, while a server in a thread has them."""
    with MetricsServer(socket.create_server(("127.0.0.1", 0)), collector, health) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield made.url
        finally:
            made.shutdown()
            thread.join()


def fetch(url: str, **headers: str) -> tuple[str, str]:
    shown = {key.replace("_", "-"): value for key, value in headers.items()}
    request = urllib.request.Request(url, headers=shown)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        body = reply.read()
        if reply.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        return body.decode(), reply.headers["Content-Type"]


def scrape(url: str) -> Samples:
    return samples(parsed(fetch(url)[0]))


def until(url: str, name: str, value: float) -> Samples:
    """Scrape until a metric without labels has that value."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := scrape(url)).get((name, ())) != value:
        assert time.monotonic() < deadline, f"{name} is {found.get((name, ()))}"
    return found
