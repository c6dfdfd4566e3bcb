"""The command diloco-exporter."""

import importlib.metadata
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from diloco_protocol.clients.command_line import (
    App,
    FeedArgument,
    FeedOption,
    FeedServerOption,
    feed_of,
)
from diloco_protocol.errors import UsageError
from diloco_protocol.feed import FeedError, FeedRefusedError, FeedVersionError, Snapshot
from diloco_tools.monitor.feed.listener import FeedSubscriber, Listener
from diloco_tools.terminal import (
    HostOption,
    InsecureOption,
    KeysOption,
    check_host,
    fail,
    keys_of,
    listen,
)

COMMAND = "diloco-exporter"
DEFAULT_PORT = 9512
# A broker publishes every second, also while it saves and steps; a `torch.optim` outer optimizer over a
# large model may block it for seconds.
DEAD_AFTER_S = 30.0
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}

app = App()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Block the signals that end the exporter, in all threads, for `sigwait`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        while signal.sigpending() & STOP_SIGNALS:  # a second one
            signal.sigwait(STOP_SIGNALS)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@app.command(
    epilog="Exit codes: 0 ended by Ctrl-C or SIGTERM, 2 it could not start (the reason is printed)."
)
@_signals_held()
def exporter(
    *,
    address: FeedArgument = None,
    feed: FeedOption = None,
    broker: FeedServerOption = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for Prometheus; 0 takes a free one.")
    ] = DEFAULT_PORT,
    host: HostOption = "127.0.0.1",
    max_workers: Annotated[
        int, typer.Option(min=0, help="Workers with series of their own; others are only counted.")
    ] = 200,
    dead_after: Annotated[
        float, typer.Option(min=1.0, help="Seconds of silence after which /healthz returns 503.")
    ] = DEAD_AFTER_S,
    keys: KeysOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Export the state of a DiLoCo run to Prometheus.

    Reads the feed of a diloco-broker, now or as soon as it is up, and never changes the run.
    """
    try:
        from diloco_tools.monitor.metrics.metrics import RunCollector
        from diloco_tools.monitor.metrics.server import POLL_S, MetricsServer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "prometheus_client":
            raise
        fail(COMMAND, "prometheus-client is not installed: pip install 'diloco-broker[prometheus]'")
    said = ""

    def complain(error: FeedError) -> None:
        """Report an error once, although every reconnection repeats it."""
        nonlocal said
        if isinstance(error, FeedVersionError | FeedRefusedError) and str(error) != said:
            said = str(error)
            print(f"diloco-exporter: {said}", file=sys.stderr, flush=True)

    def note(_: Snapshot) -> None:
        nonlocal said
        said = ""

    try:
        check_host(host, DEFAULT_PORT, insecure=insecure)
        key = keys_of(keys, steers=False)
        subscriber = FeedSubscriber(feed_of(address, feed, broker, key), keys=key)
    except (FeedError, UsageError) as error:
        fail(COMMAND, error)
    listener = Listener(subscriber, note, complain)

    def why_dead() -> str | None:
        return listener.read().why_dead(dead_after)

    collector = RunCollector(
        listener.read, importlib.metadata.version("diloco-broker"), max_workers
    )
    with listener:
        listening = listen(COMMAND, host, port)
        with MetricsServer(listening, collector, why_dead) as server:
            threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True).start()
            print(
                f"diloco-exporter: {server.url} serves the metrics of {listener.address}",
                flush=True,
            )
            signal.sigwait(STOP_SIGNALS)
            server.shutdown()


if __name__ == "__main__":
    app()
