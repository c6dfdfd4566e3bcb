"""The command diloco-exporter."""

import importlib.metadata
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer

from diloco_protocol.addresses import is_loopback
from diloco_protocol.clients.command_line import (
    App,
    FeedArgument,
    FeedOption,
    FeedServerOption,
    feed_of,
)
from diloco_protocol.errors import UsageError
from diloco_protocol.feed import FeedError, FeedRefusedError, FeedVersionError, Snapshot
from diloco_tools.monitor.feed.listener import FeedWatcher
from diloco_tools.terminal import KeysOption, fail, keys_of

CANNOT_START = 2
# A broker publishes each second, also while it saves and steps. What it is silent for beyond this is no
# load; a `torch.optim` outer optimizer over a large model may take seconds at a time.
DEAD_AFTER_S = 30.0
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}

app = App()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Signals that end the exporter wait, in all threads, for `sigwait`: they cut nothing short."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        while signal.sigpending() & STOP_SIGNALS:  # a second one, while the first was obeyed
            signal.sigwait(STOP_SIGNALS)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@app.command(
    epilog="Exit codes: 0 it was ended by Ctrl-C or SIGTERM, 2 it could not start (one sentence "
    "says why)."
)
@_signals_held()
def exporter(
    *,
    address: FeedArgument = None,
    feed: FeedOption = None,
    broker: FeedServerOption = None,
    port: Annotated[int, typer.Option(help="Port for Prometheus; 0 takes a free one.")] = 9512,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but loopback needs --insecure.")
    ] = "127.0.0.1",
    max_workers: Annotated[
        int, typer.Option(help="Workers with series of their own; the others are counted only.")
    ] = 200,
    dead_after: Annotated[
        float,
        typer.Option(min=1.0, help="Seconds of silence after which /healthz says 503, not 200."),
    ] = DEAD_AFTER_S,
    keys: KeysOption = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Listen on an address that other machines reach: all of them can read the metrics.",
        ),
    ] = False,
) -> None:
    """Offer the state of a DiLoCo run to Prometheus.

    Reads the feed of a diloco-broker, now or as soon as it is there, and changes nothing there.
    """
    try:
        from diloco_tools.monitor.metrics.metrics import RunCollector
        from diloco_tools.monitor.metrics.server import POLL_S, MetricsServer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "prometheus_client":
            raise
        _fail(
            "the package prometheus-client is missing: install it with "
            'pip install "diloco-broker[prometheus]"'
        )
    if not 0 <= port <= 65535:
        _fail(f"--port {port} is no port: give a number from 0 to 65535, 0 for a free one")
    if max_workers < 0:
        _fail(f"--max-workers {max_workers} is no number of workers: give 0 or more")
    if not is_loopback(host) and not insecure:
        _fail(
            f"{host!a} can be reached from other machines, and whoever reaches it can read the metrics: "
            "have Prometheus ask through an SSH tunnel (ssh -L 9512:127.0.0.1:9512 HOST), or add "
            "--insecure"
        )
    said = ""

    def complain(error: FeedError) -> None:
        """Once, though the connection is made again: the broker may be replaced meanwhile."""
        nonlocal said
        if isinstance(error, FeedVersionError | FeedRefusedError) and str(error) != said:
            said = str(error)
            print(f"diloco-exporter: {said}", file=sys.stderr, flush=True)

    def note(_snapshot: Snapshot, _now: float) -> None:
        nonlocal said
        said = ""

    try:
        key = keys_of(keys, steers=False)
        watcher = FeedWatcher(feed_of(address, feed, broker, key), complain, note, key)
    except (FeedError, UsageError) as error:
        _fail(str(error))
    collector = RunCollector(watcher.read, importlib.metadata.version("diloco-broker"), max_workers)
    with watcher:
        try:
            server = MetricsServer(
                host, port, collector, lambda: watcher.read().why_dead(dead_after)
            )
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            _fail(
                f"cannot listen on {host!a} port {port} ({reason}): give an address of this "
                "machine with --host and a free port with --port, or --port 0"
            )
        with server:
            threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True).start()
            print(f"diloco-exporter: {server.url} has the metrics of {watcher.address}", flush=True)
            signal.sigwait(STOP_SIGNALS)
            server.shutdown()


def _fail(sentence: str) -> NoReturn:
    fail("diloco-exporter", sentence, CANNOT_START)


if __name__ == "__main__":
    app()
