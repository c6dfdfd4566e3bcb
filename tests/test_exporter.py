"""diloco-exporter: what a snapshot becomes, how it is named, and what it costs to be scraped.

The mapping is pure and tested so; scrapes go over HTTP to a running exporter that reads a socket bound
here, and are read by the parsers that prometheus_client has for both formats.
"""

import gzip
import json
import math
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from prometheus_client import parser as plain_parser
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser
from typer.testing import CliRunner, Result

from diloco_protocol.errors import Code
from diloco_tools import feed
from diloco_tools.exporter import catalogue, server
from diloco_tools.exporter.catalogue import Reading
from diloco_tools.exporter.cli import app
from diloco_tools.exporter.labels import HELD_S, LONGEST_VALUE, Places, label_value
from diloco_tools.exporter.metrics import Family, families
from diloco_tools.exporter.reader import FeedReader
from diloco_tools.exporter.server import FamilyCollector, MetricsServer
from diloco_tools.feed import TOPIC, FeedModel, Snapshot, parse_snapshot
from diloco_tools.subscriber import FeedSubscriber

PATIENCE_S = 20.0  # for what ought to happen at once
README = Path(__file__).parent.parent / "tools" / "README.md"
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


def frame(document: Any) -> bytes:
    return TOPIC + json.dumps(document).encode()


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


def names(samples: Samples) -> set[str]:
    return {name for name, _ in samples}


class TestMapping:
    def test_every_figure_of_the_feed_has_its_metric(self) -> None:
        seen = exported(status(), received=8, unreadable=3)
        for name, value in {
            "diloco_feed_up": 1,
            "diloco_feed_age_seconds": 0,
            "diloco_feed_snapshots_received_total": 8,
            "diloco_feed_snapshots_missed_total": 0,
            "diloco_feed_frames_unreadable_total": 3,
            "diloco_broker_restarts_total": 0,
            "diloco_run_healthy": 0,  # b is lost
            "diloco_broker_uptime_seconds": 8000,
            "diloco_broker_cpu_seconds_total": 312.5,
            "diloco_broker_resident_memory_bytes": 310_000_000,
            "diloco_broker_longest_turn_seconds": 0.0045,
            "diloco_workers_alive": 5,
            "diloco_workers_participating": 4,
            "diloco_workers_averaged": 3,
            "diloco_workers_wanted": 2,
            "diloco_workers_minimum": 1,
            "diloco_workers_without_series": 0,
            "diloco_deaths_total": 1,
            "diloco_rounds_total": 411,
            "diloco_pushes_total": 1644,
            "diloco_contributions_total": 1640,
            "diloco_malformed_messages_total": 9,
            "diloco_uploaded_bytes_total": 150_000,
            "diloco_downloaded_bytes_total": 300_000,
            "diloco_outer_learning_rate": 0.75,
            "diloco_outer_momentum": 0.5,
            "diloco_outer_buffer_gradients": 4,
            "diloco_sync_every_steps": 500,
            "diloco_pending_submissions": 6,
            "diloco_waiting_submissions": 2,
            "diloco_model_parameters": 1000,
            "diloco_model_size_bytes": 4000,
            "diloco_fragments": 2,
            "diloco_checkpoint_age_seconds": 63.5,
            "diloco_checkpoint_round": 410,
            "diloco_checkpoint_failed": 0,
            "diloco_round_number": 412,
            "diloco_round_fragment": 1,
            "diloco_round_age_seconds": 12.25,
            "diloco_round_closing": 1,
            "diloco_round_workers_expected": 3,
            "diloco_round_workers_arrived": 1,
            "diloco_round_workers_missing": 2,
            "diloco_round_workers_floor": 2,
            "diloco_last_round_number": 411,
            "diloco_last_round_seconds": 41.25,
            "diloco_last_round_weight": 3,
            "diloco_last_round_loss": 2.375,
            "diloco_last_round_delta_norm": 0.0625,
            "diloco_last_round_staleness_versions": 1,
        }.items():
            assert seen.pop((name, ())) == value, name
        for name, value in {
            "diloco_worker_healthy": 1,
            "diloco_worker_heartbeat_age_seconds": 0.5,
            "diloco_worker_sync_age_seconds": 12.5,
            "diloco_worker_round": 411,
            "diloco_worker_steps_total": 205_712,
            "diloco_worker_inner_steps": 212,
            "diloco_worker_sync_every_steps": 250,
            "diloco_worker_steps_per_second": 5.25,
            "diloco_worker_loss": 2.5,
            "diloco_worker_staleness_versions": 1,
            "diloco_worker_tokens_total": 420_000,
            "diloco_worker_pushes_total": 410,
            "diloco_worker_refused_pushes_total": 2,
            "diloco_worker_uploaded_bytes_total": 38_000,
            "diloco_worker_downloaded_bytes_total": 76_000,
        }.items():
            assert seen.pop((name, ("a",))) == value, name
        for number in (0, 1):
            labels = (str(number),)
            assert seen.pop(("diloco_fragment_version", labels)) == 206 - number
            assert seen.pop(("diloco_fragment_buffered_gradients", labels)) == 2 - number
            assert seen.pop(("diloco_fragment_contributions_total", labels)) == 600 - 3 * number
        for name, *values in (
            ("diloco_exporter_build_info", "9.9"),
            ("diloco_build_info", "0.1.0"),
            ("diloco_run_info", "3fa2c1d09b11", "sync", "dn paper", "bf16", "fp32"),
        ):
            assert seen.pop((name, tuple(values))) == 1, name
        left = {name for name, labels in seen if not {"b", "c"} & set(labels)}
        assert left == {"diloco_run_state", "diloco_workers", "diloco_refused_pushes_total"}

    def test_a_state_is_one_of_few(self) -> None:
        def states(state: str) -> dict[str, float]:
            seen = exported(status(state=state))
            return {
                labels[0]: value
                for (name, labels), value in seen.items()
                if name == "diloco_run_state"
            }

        none = dict.fromkeys(("training", "waiting", "paused", "stopping", "other"), 0.0)
        assert states("paused") == none | {"paused": 1}
        assert states("asleep") == none | {"other": 1}

    def test_workers_are_counted_by_health(self) -> None:
        seen = exported(status(workers=[worker(n, health=h) for n, h in zip(
            "abcdef", ("ok", "ok", "slow", "stalled", "lost", "sleepy"), strict=True
        )]))  # fmt: skip
        for health, count in zip(
            ("ok", "slow", "stalled", "lost", "other"), (2, 1, 1, 1, 1), strict=True
        ):
            assert seen["diloco_workers", (health,)] == count

    def test_refused_pushes_go_by_the_known_reasons(self) -> None:
        def refused(**totals: Any) -> dict[str, float]:
            seen = exported(status(totals=totals))
            return {
                labels[0]: value
                for (name, labels), value in seen.items()
                if name == "diloco_refused_pushes_total"
            }

        none = dict.fromkeys([*(code.value for code in Code), "other"], 0.0)
        assert refused() == none
        codes = {"stale": 4, "made_up": 1, "x" * 1000: 2, "late": "many", "bad_push": None}
        assert refused(rejected=7, refused=codes) == none | {"stale": 4, "other": 3}
        assert refused(rejected=5) == none | {"other": 5}, "an older broker tells no reasons"

    def test_what_is_not_known_has_no_sample(self) -> None:
        seen = exported(
            status(
                model=None,
                round=None,
                last_round=None,
                checkpoint=None,
                sync_every=None,
                outer={"optimizer": "torch"},
                loop={},
                workers=[worker("a", round=None, steps_per_s=None, loss=None, sync_age_s=None)],
                fragments=[],
            )
        )
        gone = {
            "diloco_model_parameters", "diloco_round_age_seconds", "diloco_last_round_seconds",
            "diloco_checkpoint_age_seconds", "diloco_checkpoint_failed", "diloco_sync_every_steps",
            "diloco_outer_learning_rate", "diloco_outer_buffer_gradients", "diloco_fragments",
            "diloco_broker_cpu_seconds_total", "diloco_broker_longest_turn_seconds",
            "diloco_worker_round", "diloco_worker_loss", "diloco_worker_steps_per_second",
            "diloco_worker_sync_age_seconds", "diloco_fragment_version", "diloco_run_paused_seconds",
        }  # fmt: skip
        assert not gone & names(seen)
        assert gone <= {metric.name for metric in catalogue.catalogue()}

    def test_a_pause_and_a_failed_save_show(self) -> None:
        seen = exported(
            status(paused_for_s=5.0, checkpoint={"folder": "/x", "error": "disk full"}),
            later_s=2.0,
        )
        assert seen["diloco_run_paused_seconds", ()] == 7
        assert seen["diloco_checkpoint_failed", ()] == 1
        assert ("diloco_checkpoint_age_seconds", ()) not in seen

    def test_a_lost_worker_does_not_train(self) -> None:
        seen = exported(status(workers=[worker("b", health="lost")]))
        assert seen["diloco_worker_healthy", ("b",)] == 0
        assert not {"diloco_worker_inner_steps", "diloco_worker_steps_per_second"} & names(seen)

    def test_a_loss_that_is_not_finite_is_not_a_number(self) -> None:
        seen = exported(status(workers=[worker("a", loss=None, loss_is_finite=False)]))
        assert math.isnan(seen["diloco_worker_loss", ("a",)])

    def test_asynchronous_mode_has_no_rounds(self) -> None:
        seen = exported(status(mode="async"))
        assert not {name for name in names(seen) if name.startswith("diloco_round_")}
        assert "diloco_last_round_seconds" not in names(seen)
        assert seen["diloco_last_round_loss", ()] == 2.375

    def test_no_counter_is_below_zero_or_endless(self) -> None:
        totals = {"rounds": -1, "deaths": 3}
        seen = exported(status(totals=totals, loop={"cpu_s": math.inf}))
        assert seen["diloco_deaths_total", ()] == 3
        assert not {"diloco_rounds_total", "diloco_broker_cpu_seconds_total"} & names(seen)

    def test_fragments_with_series_are_bounded(self) -> None:
        seen = exported(status(fragments=[{"fragment": number} for number in range(1000)]))
        assert seen["diloco_fragments", ()] == 1000
        assert sum(name == "diloco_fragment_version" for name, _ in seen) == 256

    def test_before_the_first_round_no_round_is_shown(self) -> None:
        seen = exported(status(round={"number": 0, "floor": 2}))
        assert "diloco_round_age_seconds" not in names(seen)
        seen = exported(status(round={"number": 0, "expected": ["a"]}))
        assert "diloco_round_age_seconds" in names(seen)


class TestFreshness:
    def test_while_it_is_late_ages_go_on(self) -> None:
        seen = exported(status(), later_s=9.0)
        assert seen["diloco_feed_up", ()] == 1
        assert seen["diloco_feed_age_seconds", ()] == 9
        assert seen["diloco_round_age_seconds", ()] == 21.25
        assert seen["diloco_worker_heartbeat_age_seconds", ("a",)] == 9.5
        assert seen["diloco_checkpoint_age_seconds", ()] == 72.5

    def test_once_it_is_stale_nothing_of_the_snapshot_is_left(self) -> None:
        assert exported(status(), later_s=60.0, received=3, unreadable=1) == {
            ("diloco_exporter_build_info", ("9.9",)): 1,
            ("diloco_feed_up", ()): 0,
            ("diloco_run_healthy", ()): 0,
            ("diloco_feed_age_seconds", ()): 60,
            ("diloco_feed_snapshots_received_total", ()): 3,
            ("diloco_feed_snapshots_missed_total", ()): 0,
            ("diloco_feed_frames_unreadable_total", ()): 1,
            ("diloco_broker_restarts_total", ()): 0,
        }

    def test_before_the_first_snapshot_there_is_no_age(self) -> None:
        found = families(Reading(FeedModel()), 5.0, "9.9", everybody)
        values = {family.metric.name: family.samples[0][1] for family in found}
        assert values["diloco_feed_up"] == 0
        assert "diloco_feed_age_seconds" not in values

    def test_health_is_the_verdict_of_the_other_displays(self) -> None:
        assert exported(status(workers=[worker("a")]))["diloco_run_healthy", ()] == 1
        assert exported(status(state="waiting"))["diloco_run_healthy", ()] == 0

    def test_missed_snapshots_and_restarts_are_counted(self) -> None:
        model = FeedModel()
        for epoch, sequence in (("a", 1), ("a", 4), ("b", 1)):
            model.update(Snapshot(1, sequence, epoch), now=0.0)
        found = families(Reading(model), 0.0, "9.9", everybody)
        values = {family.metric.name: family.samples[0][1] for family in found}
        assert values["diloco_feed_snapshots_missed_total"] == 2
        assert values["diloco_broker_restarts_total"] == 1


class TestLabels:
    @pytest.mark.parametrize("text", HOSTILE, ids=ascii)
    def test_any_text_becomes_a_short_printable_value(self, text: str) -> None:
        value = label_value(text)
        assert len(value) <= LONGEST_VALUE
        assert value.isprintable()
        value.encode()

    def test_what_is_short_and_printable_stays_and_the_rest_stays_apart(self) -> None:
        assert label_value("a100-0") == "a100-0"
        assert label_value("größe-工作者") == "größe-工作者"
        assert len({label_value(text) for text in HOSTILE}) == len(HOSTILE)
        assert label_value("two\nlines").startswith("two?lines~")
        assert label_value("x" * 65).startswith("x" * 55 + "~")

    def test_the_first_to_come_have_places_and_keep_them(self) -> None:
        places = Places(2)
        assert places.take(["m", "n"], 0.0) == {"m": "m", "n": "n"}
        assert places.take(["a", "m", "n"], 1.0) == {"m": "m", "n": "n"}
        assert places.take(["a", "n"], 2.0) == {"n": "n"}, "the place of m is held"
        assert places.take(["a", "m", "n"], 3.0) == {"m": "m", "n": "n"}

    def test_a_place_is_free_once_its_worker_was_gone_for_long(self) -> None:
        places = Places(1)
        places.take(["a"], 0.0)
        assert places.take(["b"], HELD_S) == {}
        assert places.take(["b"], HELD_S + 1) == {"b": "b"}
        assert places.take(["a", "b"], HELD_S + 2) == {"b": "b"}

    def test_ever_new_names_cannot_fill_prometheus(self) -> None:
        places = Places(20)
        seen: set[str] = set()
        for second in range(3600):
            seen |= set(places.take([f"w{second}"], float(second)).values())
        assert len(seen) <= 20 * (1 + 3600 / HELD_S)

    def test_two_ids_that_look_the_same_have_one_series(self) -> None:
        long = "x" * 100
        places = Places(5)
        assert places.take([long, label_value(long), "b"], 0.0) == {
            long: label_value(long),
            "b": "b",
        }

    def test_no_place_at_all_will_do(self) -> None:
        assert Places(0).take(["a"], 0.0) == {}


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


class TestNames:
    @pytest.mark.parametrize("metric", catalogue.catalogue(), ids=lambda metric: metric.name)
    def test_keep_the_rules_of_promtool(self, metric: catalogue.Metric) -> None:
        assert problems(metric.name, metric.kind, metric.help, metric.labels) == set()
        assert metric.name.startswith("diloco_")
        assert metric.help.endswith(".")
        assert "\n" not in metric.help

    @pytest.mark.parametrize(
        ("name", "kind", "problem"),
        [
            ("diloco_rounds", "counter", "_total is for counters, and each counter"),
            ("diloco_age_total", "gauge", "_total is for counters, and each counter"),
            ("diloco_age_ms", "gauge", "abbreviated unit"),
            ("diloco_age_milliseconds", "gauge", "no base unit"),
            ("diloco_age_hours", "gauge", "no base unit"),
            ("diloco_sent_megabytes_total", "counter", "no base unit"),
            ("diloco_seconds_of_age", "gauge", "its unit is not at the end"),
            ("diloco_age_gauge", "gauge", "its type in its name"),
            ("diloco_counter_of_rounds", "gauge", "its type in its name"),
            ("diloco:age", "gauge", "not snake case"),
            ("diloco_roundAge", "gauge", "not snake case"),
            ("diloco_worker_count", "gauge", "suffix of a histogram"),
        ],
    )
    def test_the_check_finds_what_is_wrong(self, name: str, kind: str, problem: str) -> None:
        assert problem in problems(name, kind, "Help.")
        assert problems("diloco_age_seconds", "gauge", "", ["workerId"]) == {"no help", "bad label"}

    def test_each_metric_is_there_once(self) -> None:
        all_names = [metric.name for metric in catalogue.catalogue()]
        assert len(all_names) == len(set(all_names))

    def test_the_readme_has_them_all(self) -> None:
        text = README.read_text()
        missing = [m.name for m in catalogue.catalogue() if f"`{m.name}`" not in text]
        assert not missing


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


class Publisher:
    """A broker's feed without a broker; sends only to somebody who has subscribed."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.XPUB)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"

    def await_subscriber(self) -> None:
        assert self._socket.poll(int(1000 * PATIENCE_S))
        assert self._socket.recv() == b"\x01" + TOPIC

    def send(self, payload: bytes) -> None:
        self._socket.send(payload)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.close()


def first_line(process: subprocess.Popen[str]) -> str:
    output = process.stdout
    assert output is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(output.readline()), daemon=True)
    reader.start()
    reader.join(PATIENCE_S)
    assert lines, "the exporter said nothing"
    return lines[0]


@contextmanager
def running(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own; gives it and the address of its metrics."""
    process = subprocess.Popen(
        [sys.executable, "-m", "diloco_tools.exporter.cli", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    try:
        line = first_line(process)
        found = re.search(r"http://\S+/metrics", line)
        assert found, line
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def exporter(publisher: Publisher) -> Iterator[str]:
    """The address of a running exporter that has subscribed to `publisher`."""
    with running("--feed", publisher.address, "--max-workers", "20") as (_, url):
        publisher.await_subscriber()
        yield url


class TestScrape:
    def test_both_formats_say_what_the_snapshot_says(
        self, publisher: Publisher, exporter: str
    ) -> None:
        publisher.send(frame(status()))
        until(exporter, "diloco_feed_snapshots_received_total", 1)
        text, content_type = fetch(exporter)
        assert content_type.startswith("text/plain")
        accept = "application/openmetrics-text; version=1.0.0"
        opened, content_type = fetch(exporter, Accept=accept, Accept_Encoding="gzip")
        assert content_type.startswith("application/openmetrics-text")
        plain, strict = values(parsed(text)), values(parsed(opened, openmetrics=True))
        age = ("diloco_feed_age_seconds", frozenset[tuple[str, str]]())
        ages = {key for key in plain if key[0].endswith("_age_seconds")}
        assert age in ages
        assert plain.keys() == strict.keys()
        assert {key: plain[key] for key in plain.keys() - ages} == {
            key: strict[key] for key in strict.keys() - ages
        }
        expected = exported(status(), received=1)
        by_name = {metric.name: metric for metric in catalogue.catalogue()}
        for (name, labels), value in expected.items():
            if name == "diloco_exporter_build_info":
                continue
            key = (name, frozenset(zip(by_name[name].labels, labels, strict=True)))
            if key in ages:
                assert value <= plain[key] < value + PATIENCE_S
            else:
                assert plain[key] == value, key
        assert len(plain) == len(expected)

    def test_what_is_scraped_keeps_the_rules_of_promtool(
        self, publisher: Publisher, exporter: str
    ) -> None:
        publisher.send(frame(status(paused_for_s=1.0)))
        until(exporter, "diloco_feed_snapshots_received_total", 1)
        text, _ = fetch(exporter)
        seen = set()
        for metric in parsed(text):
            name = metric.name + ("_total" if metric.type == "counter" else "")
            labels = {label for sample in metric.samples for label in sample.labels}
            assert problems(name, metric.type, metric.documentation, labels) == set(), name
            seen.add(name)
        assert seen == {metric.name for metric in catalogue.catalogue()}
        accept = "application/openmetrics-text"
        for metric in parsed(fetch(exporter, Accept=accept)[0], openmetrics=True):
            for unit in ("seconds", "bytes"):
                assert (metric.unit == unit) == metric.name.endswith(f"_{unit}"), metric.name

    def test_series_of_workers_are_bounded(self, publisher: Publisher, exporter: str) -> None:
        publisher.send(frame(status(workers=[worker(f"w{n:03}") for n in range(500)])))
        found = until(exporter, "diloco_feed_snapshots_received_total", 1)
        labels = {dict(key[1]).get("worker") for key in found} - {None}
        assert labels == {f"w{number:03}" for number in range(20)}
        assert found["diloco_workers_without_series", frozenset()] == 480
        assert found["diloco_workers", frozenset({("health", "ok")})] == 500

    def test_hostile_worker_ids_are_only_labels(self, publisher: Publisher, exporter: str) -> None:
        document = status(workers=[worker(name) for name in HOSTILE])
        publisher.send(frame(document))
        found = until(exporter, "diloco_feed_snapshots_received_total", 1)
        assert found["diloco_feed_up", frozenset()] == 1
        labels = {dict(labels).get("worker") for _, labels in found} - {None}
        assert labels == {label_value(name) for name in HOSTILE}
        opened, _ = fetch(exporter, Accept="application/openmetrics-text")
        assert values(parsed(opened, openmetrics=True)).keys() == found.keys()

    def test_garbage_and_a_newer_feed_are_counted_and_survived(self, publisher: Publisher) -> None:
        with running("--feed", publisher.address) as (process, url):
            publisher.await_subscriber()
            # One after the other: of two at once only the newer one would be kept.
            for number, payload in enumerate((TOPIC + b"{", frame(status(feed=2))), 1):
                publisher.send(payload)
                found = until(url, "diloco_feed_frames_unreadable_total", number)
                assert found["diloco_feed_up", frozenset()] == 0
            publisher.send(frame(status()))
            assert until(url, "diloco_feed_up", 1)["diloco_workers_alive", frozenset()] == 5
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE_S)
        (sentence,) = errors.splitlines()
        assert "feed version 2 and this program reads version 1" in sentence

    def test_a_scrape_may_ask_for_some_metrics_only(
        self, publisher: Publisher, exporter: str
    ) -> None:
        publisher.send(frame(status()))
        until(exporter, "diloco_feed_snapshots_received_total", 1)
        asked = "diloco_workers_alive", "diloco_rounds_total"
        text, _ = fetch(exporter + "?" + "&".join(f"name[]={name}" for name in asked))
        assert {name for name, _ in values(parsed(text))} == set(asked)

    def test_other_paths_say_where_the_metrics_are(self, exporter: str) -> None:
        home = exporter.removesuffix("metrics")
        assert "/metrics" in fetch(home)[0]
        with pytest.raises(urllib.error.HTTPError, match="404") as raised:
            fetch(home + "favicon.ico")
        raised.value.close()

    def test_stale_takes_the_workers_away_and_news_bring_them_back(
        self, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(feed, "STALE_ABOVE_S", 0.3)
        monkeypatch.setattr(feed, "LIVE_BELOW_S", 0.2)
        with FeedSubscriber(publisher.address) as subscriber:
            reader = FeedReader(subscriber, complain=pytest.fail)
            places = Places(9)

            def collect() -> list[Family]:
                reading, now = reader.read()
                return families(reading, now, "9.9", lambda ids: places.take(ids, now))

            with serving(collect) as url, reader:
                publisher.await_subscriber()
                publisher.send(frame(status(sequence=1)))
                until(url, "diloco_feed_up", 1)
                gone = until(url, "diloco_feed_up", 0)
                assert not [labels for _, labels in gone if "worker" in dict(labels)]
                assert ("diloco_workers_alive", frozenset()) not in gone
                publisher.send(frame(status(sequence=4)))
                back = until(url, "diloco_workers_alive", 5)
                assert back["diloco_feed_snapshots_missed_total", frozenset()] == 2


@contextmanager
def serving(collect: Callable[[], Sequence[Family]]) -> Iterator[str]:
    with MetricsServer("127.0.0.1", 0, FamilyCollector(collect)) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield made.url
        finally:
            made.shutdown()
            thread.join()


def port_of(url: str) -> int:
    found = re.search(r":(\d+)/", url)
    assert found
    return int(found[1])


def connect(url: str, receive_buffer: int | None = None) -> socket.socket:
    made = socket.socket()
    if receive_buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.settimeout(PATIENCE_S)
    made.connect(("127.0.0.1", port_of(url)))
    return made


UP = Family(catalogue.UP, (((), 1.0),))
# So long that no buffer of a socket takes it whole.
ENDLESS = Family(replace(catalogue.HEALTHY, help="x" * (32 << 20)), (((), 1.0),))


class TestSlowClients:
    def test_those_who_say_nothing_keep_nobody_from_scraping(self) -> None:
        with serving(lambda: [UP]) as url:
            silent = [connect(url) for _ in range(3 * server.MOST_CONNECTIONS)]
            began = time.monotonic()
            assert scrape(url) == {("diloco_feed_up", frozenset()): 1.0}
            assert time.monotonic() - began < server.LONGEST_CONNECTION_S / 2
            assert silent[0].recv(1) == b"", "the oldest had to go"
            for each in silent:
                each.close()

    def test_one_who_never_reads_keeps_nobody_from_scraping(self) -> None:
        answers = iter([[ENDLESS], *([[UP]] * 9)])
        with serving(lambda: next(answers)) as url, connect(url, receive_buffer=4096) as greedy:
            greedy.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert greedy.recv(12) == b"HTTP/1.0 200"  # it has its answer, and does not take it
            assert ("diloco_feed_up", frozenset()) in scrape(url)

    def test_one_who_never_reads_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = threading.active_count()
        with serving(lambda: [ENDLESS]) as url, connect(url, receive_buffer=4096) as greedy:
            greedy.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert greedy.recv(12) == b"HTTP/1.0 200"
            monkeypatch.setattr(server, "LONGEST_CONNECTION_S", 0.0)
            await_threads(before + 1)  # that of the server alone

    def test_one_who_drips_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "LONGEST_CONNECTION_S", 0.2)
        with serving(lambda: [UP]) as url, connect(url) as dripping:
            dripping.sendall(b"GET /metrics HTTP/1.0\r\n")
            dripping.settimeout(0.02)
            deadline = time.monotonic() + PATIENCE_S
            with suppress(ConnectionError):
                while not is_ended(dripping):
                    assert time.monotonic() < deadline
                    dripping.sendall(b"X: y\r\n")

    def test_nonsense_gets_an_answer_and_leaves_no_thread(self) -> None:
        before = threading.active_count()
        with serving(lambda: [UP]) as url:
            for nonsense in (
                b"\x00\xff\n\n",
                b"GET\r\n\r\n",
                b"POST /metrics HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n",
                b"GET /metrics HTTP/9.9\r\n\r\n",
                b"GET /" + b"x" * 70_000 + b" HTTP/1.0\r\n\r\n",
                b"GET / HTTP/1.0\r\n" + b"a: b\r\n" * 200 + b"\r\n",
            ):
                # It may hang up before it has read all.
                with suppress(ConnectionError), connect(url) as client:
                    client.sendall(nonsense)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(65536):
                        pass
            assert scrape(url) == {("diloco_feed_up", frozenset()): 1.0}
            await_threads(before + 1)

    def test_a_fault_of_ours_is_told_and_the_next_scrape_works(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        answers = iter([[], [UP]])

        def collect() -> list[Family]:
            answer = next(answers)
            assert answer, "a fault of ours"
            return answer

        with serving(collect) as url:
            with pytest.raises(OSError, match="without response"):
                fetch(url)
            assert ("diloco_feed_up", frozenset()) in scrape(url)
        assert "AssertionError: a fault of ours" in capsys.readouterr().err


def is_ended(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False


def await_threads(count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join(max(0.0, deadline - time.monotonic()))
    assert threading.active_count() <= count


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner(env={"DILOCO_FEED": None, **environment}).invoke(app, list(arguments))


def failed(*arguments: str, **environment: str) -> str:
    """The one sentence of a start that failed with exit code 2."""
    result = run(*arguments, **environment)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (sentence,) = result.stderr.splitlines()
    assert sentence.startswith("diloco-exporter: ")
    return sentence


class TestCommand:
    @pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_ends_it_with_0_whatever_clients_do(self, sign: signal.Signals) -> None:
        with running("--feed", "tcp://127.0.0.1:1") as (process, url), connect(url) as silent:
            silent.sendall(b"GET /met")
            process.send_signal(sign)
            process.send_signal(sign)
            output, errors = process.communicate(timeout=PATIENCE_S)
            assert (process.returncode, output, errors) == (0, "", "")

    def test_the_address_may_come_from_the_environment(self, publisher: Publisher) -> None:
        with running(DILOCO_FEED=publisher.address) as (_, url):
            publisher.await_subscriber()
            publisher.send(frame(status()))
            until(url, "diloco_workers_alive", 5)

    def test_a_port_in_use_is_one_sentence(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            sentence = failed("--port", str(port))
        assert f"127.0.0.1' port {port} (Address already in use)" in sentence

    @pytest.mark.parametrize("host", ["192.0.2.1", "", "x" * 300, "256.1.1.1", "a b", "\x00"])
    def test_an_address_that_is_not_of_this_machine_is_one_sentence(self, host: str) -> None:
        assert "give an address of this machine" in failed("--port", "0", "--host", host)

    @pytest.mark.parametrize("port", ["-1", "65536", "99999999999"])
    def test_what_is_no_port_is_one_sentence(self, port: str) -> None:
        assert f"--port {port} is no port" in failed(f"--port={port}")

    def test_a_negative_number_of_workers_is_one_sentence(self) -> None:
        assert "--max-workers -1" in failed("--max-workers=-1")

    @pytest.mark.parametrize("address", ["foo", "tcp://h:0", "localhost:8513"])
    def test_what_is_no_feed_address_is_one_sentence(self, address: str) -> None:
        assert "tcp://HOST:PORT" in failed("--feed", address)
        assert "tcp://HOST:PORT" in failed(DILOCO_FEED=address)

    def test_a_missing_package_is_one_sentence_that_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
        monkeypatch.delitem(sys.modules, "diloco_tools.exporter.server")
        assert 'pip install "diloco-broker[prometheus]"' in failed("--port", "0")
        assert run("--help").exit_code == 0

    def test_signals_are_as_before_once_it_has_failed(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        failed("--port=-1")
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before

    def test_help_tells_defaults_and_exit_codes(self) -> None:
        text = " ".join(re.sub("[│ \n]+", " ", run("--help").stdout).split())
        for told in ("9512", "127.0.0.1", "DILOCO_FEED", "--max-workers", "200", "2 it could not"):
            assert told in text

    def test_starts_without_torch(self) -> None:
        code = "import sys, diloco_tools.exporter.cli; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    def test_an_ipv6_address_is_written_with_brackets(self) -> None:
        if not socket.has_ipv6:
            pytest.skip("this machine has no IPv6")
        try:
            with MetricsServer("::1", 0, FamilyCollector(lambda: [UP])) as made:
                assert made.url.startswith("http://[::1]:")
        except OSError as error:
            pytest.skip(f"this machine has no IPv6 loopback: {error}")
