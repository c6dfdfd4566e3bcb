"""diloco-exporter over HTTP: scrapes, clients that are slow or hostile, and the command."""

import select
import signal
import socket
import sys
import threading
import time
import urllib.error
from collections.abc import Iterable, Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric

from diloco_protocol.feed import TOPIC, parse_snapshot
from diloco_tools.monitor.feed import model
from diloco_tools.monitor.feed.listener import FeedSubscriber, Listener, Reading
from diloco_tools.monitor.metrics import server
from diloco_tools.monitor.metrics.cli import DEAD_AFTER_S, app
from diloco_tools.monitor.metrics.metrics import RunCollector
from kit.exporter_scrapes import (
    exported,
    fetch,
    parsed,
    samples,
    scrape,
    serving,
    status,
    until,
)
from kit.feed_snapshots import PATIENCE_S, Publisher, frame, worker
from kit.web_commands import NOBODY, refusal, run, started

MODULE = "diloco_tools.monitor.metrics.cli"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def exporter(publisher: Publisher) -> Iterator[str]:
    """The metrics of an exporter, with series for 20 workers, that has subscribed to `publisher`."""
    feed = FeedSubscriber(publisher.address)
    listener = Listener(feed, lambda _: None, lambda error: pytest.fail(str(error)))
    with listener, serving(RunCollector(listener.read, "9.9", 20)) as url:
        publisher.await_subscriber()
        yield url


class TestHealth:
    """`/healthz`, by which an engine decides whether the broker is started again."""

    @pytest.mark.parametrize(
        ("sent", "age", "problem"),
        [
            (None, 0.0, "no snapshot has arrived yet"),
            ({}, 0.0, None),
            ({}, 29.0, None),
            ({}, 31.0, "the broker has sent nothing for 31 s"),
            ({"state": "waiting"}, 5.0, None),
            ({"state": "paused"}, 5.0, None),
            ({"state": "stopping"}, 1e6, None),
        ],
    )
    def test_silence_is_death(
        self, sent: dict[str, str] | None, age: float, problem: str | None
    ) -> None:
        known = model.FeedModel()
        if sent is not None:
            known.update(parse_snapshot(frame(status() | sent)), 100.0)
        assert Reading(known, 100.0 + age).why_dead(DEAD_AFTER_S) == problem

    def test_status_says_it_and_the_body_why(self) -> None:
        problems = iter([None, "the broker has sent nothing for 31 s"])
        unheard = Reading(model.FeedModel(), 0.0)
        with serving(RunCollector(lambda: unheard, "9.9", 20), lambda: next(problems)) as url:
            address = url.replace("/metrics", "/healthz")
            assert "alive" in fetch(address)[0]
            with pytest.raises(urllib.error.HTTPError) as raised:
                fetch(address)
            assert raised.value.code == 503
            assert raised.value.read() == b"the broker has sent nothing for 31 s\n"


class TestScrape:
    def test_both_formats_have_the_snapshot(self, publisher: Publisher, exporter: str) -> None:
        publisher.send(frame(status()))
        until(exporter, "diloco_feed_snapshots_received_total", 1)
        expected = exported(status(), received=1)
        for headers, kind in (
            ({}, "text/plain"),
            ({"Accept": OPENMETRICS, "Accept_Encoding": "gzip"}, "application/openmetrics-text"),
        ):
            text, content_type = fetch(exporter, **headers)
            assert content_type.startswith(kind)
            metrics = parsed(text, openmetrics="openmetrics" in kind)
            seen = samples(metrics)
            for key in seen:
                if key[0].endswith("_age_seconds"):
                    assert expected[key] <= seen[key] < expected[key] + PATIENCE_S
                    seen[key] = expected[key]
            assert seen == expected
        for metric in metrics:
            for unit in ("seconds", "bytes"):
                assert (metric.unit == unit) == metric.name.endswith(f"_{unit}"), metric.name

    def test_series_of_workers_are_bounded(self, publisher: Publisher, exporter: str) -> None:
        publisher.send(frame(status(workers=[worker(f"w{n:03}") for n in range(500)])))
        found = until(exporter, "diloco_feed_snapshots_received_total", 1)
        shown = {labels[0] for name, labels in found if name == "diloco_worker_healthy"}
        assert shown == {f"w{number:03}" for number in range(20)}
        assert found["diloco_workers_without_series", ()] == 480
        assert found["diloco_workers", ("ok",)] == 500

    def test_garbage_and_a_newer_feed_are_counted_and_survived(self, publisher: Publisher) -> None:
        # Also: the address may come from the environment.
        with started(MODULE, DILOCO_FEED=publisher.address) as (process, url):
            publisher.await_subscriber()
            # One after the other: of two at once only the newer one would be kept.
            for number, payload in enumerate((TOPIC + b"{", frame(status(feed=2))), 1):
                publisher.send(payload)
                found = until(url, "diloco_feed_frames_unreadable_total", number)
                assert found["diloco_feed_up", ()] == 0
            publisher.send(frame(status()))
            assert until(url, "diloco_feed_up", 1)["diloco_workers_alive", ()] == 5
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE_S)
        (sentence,) = errors.splitlines()
        assert "feed version 2 and this program reads version 1" in sentence

    def test_other_paths_say_where_the_metrics_are(self, exporter: str) -> None:
        home = exporter.removesuffix("metrics")
        assert "/metrics" in fetch(home)[0]
        with pytest.raises(urllib.error.HTTPError, match="404") as raised:
            fetch(home + "favicon.ico")
        raised.value.close()


class Answers:
    """A collector that says what it is told, and the last of it again."""

    def __init__(self, *answers: Metric) -> None:
        self._answers = list(answers)

    def collect(self) -> Iterable[Metric]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

        return [answer]


def connect(url: str, receive_buffer: int = 1 << 16) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.settimeout(PATIENCE_S)
    made.connect(("127.0.0.1", urlsplit(url).port))
    return made


UP = GaugeMetricFamily("up", "It is.", value=1)
SAYS_UP = {("up", ()): 1.0}
# So long that no buffer of a socket takes it whole.
ENDLESS = GaugeMetricFamily("endless", "x" * (32 << 20), value=1)


class TestSlowClients:
    def test_those_who_say_nothing_keep_nobody_from_scraping(self) -> None:
        with serving(Answers(UP)) as url:
            silent = [connect(url) for _ in range(3 * server.MOST_CONNECTIONS)]
            began = time.monotonic()
            assert scrape(url) == SAYS_UP
            assert time.monotonic() - began < server.LONGEST_CONNECTION_S / 2
            assert silent[0].recv(1) == b"", "the oldest had to go"
            for each in silent:
                each.close()

    def test_client_that_never_reads_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = threading.active_count()
        with serving(Answers(ENDLESS, UP)) as url, connect(url, receive_buffer=4096) as greedy:
            greedy.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert greedy.recv(12) == b"HTTP/1.0 200"  # it has its answer, and does not take it
            assert scrape(url) == SAYS_UP
            monkeypatch.setattr(server, "LONGEST_CONNECTION_S", 0.0)
            await_threads(before + 1)  # that of the server alone

    def test_one_who_drips_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "LONGEST_CONNECTION_S", 0.2)
        with serving(Answers(UP)) as url, connect(url) as dripping:
            dripping.sendall(b"GET /metrics HTTP/1.0\r\n")
            deadline = time.monotonic() + PATIENCE_S
            with suppress(ConnectionError):
                while not select.select([dripping], [], [], 0.02)[0] or dripping.recv(1):
                    assert time.monotonic() < deadline
                    dripping.sendall(b"X: y\r\n")

    def test_nonsense_gets_an_answer_and_leaves_no_thread(self) -> None:
        before = threading.active_count()
        with serving(Answers(UP)) as url:
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
            assert scrape(url) == SAYS_UP
            await_threads(before + 1)


def await_threads(count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join(max(0.0, deadline - time.monotonic()))
    assert threading.active_count() <= count


class TestCommand:
    @pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_ends_it_with_0_whatever_clients_do(self, sign: signal.Signals) -> None:
        with started(MODULE, "--feed", NOBODY) as (process, url), connect(url) as silent:
            silent.sendall(b"GET /met")
            process.send_signal(sign)
            process.send_signal(sign)
            output, errors = process.communicate(timeout=PATIENCE_S)
            assert (process.returncode, output, errors) == (0, "", "")

    @pytest.mark.parametrize(
        ("option", "values", "said"),
        [
            ("host", ("192.0.2.1", "", "x" * 300, "256.1.1.1", "a b", "\x00"), "--host"),
            ("feed", ("8513", "tcp://h:0", "http://h"), "must be an address"),
        ],
    )
    def test_bad_options_are_refused(self, option: str, values: tuple[str, ...], said: str) -> None:
        for value in values:
            sentence = refusal(app, "--port=0", "--insecure", f"--{option}={value}")
            assert sentence.startswith("diloco-exporter: ")
            assert said in sentence

    def test_missing_package_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
        monkeypatch.delitem(sys.modules, "diloco_tools.monitor.metrics.server")
        assert "pip install 'diloco-broker[prometheus]'" in refusal(app, "--port", "0")
        assert run(app, "--help").exit_code == 0

    def test_signals_are_as_before_once_it_has_failed(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        refusal(app, "--feed=8513")
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
