"""The command diloco-top."""

import json
import math
import sys
import time
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from diloco_tools.feed import FeedError, FeedModel
from diloco_tools.subscriber import DEFAULT_FEED_ADDRESS, FeedSubscriber
from diloco_tools.top.notation import Glyphs
from diloco_tools.top.screen import screen

HEALTHY, DEGRADED, NO_FEED, INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command(
    epilog="Exit codes: 0 the run is healthy, 1 it is degraded (the reasons are printed), "
    "2 no feed within --timeout."
)
def top(
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDR",
            envvar="DILOCO_FEED",
            help="Feed address that diloco-broker serve printed.",
        ),
    ] = DEFAULT_FEED_ADDRESS,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Print one screen and exit. So far this is what happens without it, too.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one snapshot as one JSON object, with the verdict under [bold]monitor[/].",
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for the broker.")
    ] = 5.0,
) -> None:
    """Show the state of a DiLoCo run: its round, its workers, its traffic.

    Reads the feed of a running diloco-broker and changes nothing there.
    """
    if not (timeout > 0 and math.isfinite(timeout)):
        _fail(f"--timeout {timeout:g} is no time to wait: give a number of seconds above 0")
    model = FeedModel()
    try:
        with FeedSubscriber(address) as feed:
            snapshot = feed.receive(timeout)
    except FeedError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if snapshot is None:
        _fail(_silence(feed, timeout))
    now = time.monotonic()
    model.update(snapshot, now)
    verdict = model.verdict(now)
    if as_json:
        monitor = {"verdict": verdict.word, "reasons": verdict.reasons}
        print(json.dumps({**snapshot.raw, "monitor": monitor}))
    else:
        console = Console(highlight=False)
        glyphs = Glyphs.for_encoding(sys.stdout.encoding)
        text = screen(model, now, address, console.width, glyphs)
        console.print(text, soft_wrap=True)  # the screen has its width already
    raise typer.Exit(HEALTHY if verdict.healthy else DEGRADED)


def _silence(feed: FeedSubscriber, timeout_s: float) -> str:
    if feed.malformed:
        return (
            f"no snapshot from {feed.address} within {timeout_s:g} s: {feed.malformed} unreadable "
            f"({feed.last_error}); is this the feed of diloco-broker?"
        )
    return (
        f"no feed from {feed.address} within {timeout_s:g} s: start diloco-broker serve, or give "
        "the feed address that it printed (the control address has another port)"
    )


def _fail(sentence: str) -> NoReturn:
    typer.echo(f"diloco-top: {sentence}", err=True)
    raise typer.Exit(NO_FEED)


if __name__ == "__main__":
    app()
