"""The command diloco-top: the full screen, or one screen of text, or JSON."""

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated

import typer

from diloco_protocol.clients import ask_once
from diloco_protocol.clients.command_line import (
    App,
    FeedArgument,
    FeedOption,
    FeedServerOption,
    feed_of,
)
from diloco_protocol.clients.mistaken_address import unknown_name
from diloco_protocol.errors import UsageError
from diloco_protocol.feed import FeedError
from diloco_tools.monitor.feed.listener import FeedSubscriber
from diloco_tools.monitor.feed.model import FeedModel, Freshness, inner_step_now
from diloco_tools.monitor.feed.replay import read_history
from diloco_tools.monitor.feed.series import RunSeries
from diloco_tools.monitor.terminal.scene import Player, Scene
from diloco_tools.monitor.terminal.text import MIN_WIDTH, charset, fitted_to, screen
from diloco_tools.terminal import KeysOption, ReplayOption, console, fail, keys_of

COMMAND = "diloco-top"
HEALTHY, DEGRADED, INTERRUPTED = 0, 1, 130
POLL_S = 1.0  # with --follow: how soon a silent feed is noticed

app = App()


@app.command(
    epilog="Exit codes: 0 the run is healthy or has ended (or the full screen was left), 1 it is "
    "degraded or has not begun (the reasons are printed), 2 no feed within --timeout, or a usage error."
)
def top(  # noqa: PLR0913  each is an option
    *,
    address: FeedArgument = None,
    feed: FeedOption = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Print one screen of text and exit; the default if the output is not a terminal.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one snapshot as one JSON object, with the verdict under monitor."
        ),
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="With --json or --once: continue, with a line or a screen for each snapshot.",
        ),
    ] = False,
    readonly: Annotated[
        bool, typer.Option("--readonly", help="No key changes the run; the screen says so.")
    ] = False,
    ascii_only: Annotated[
        bool, typer.Option("--ascii", help="Draw with ASCII characters only.")
    ] = False,
    replay: ReplayOption = None,
    server: FeedServerOption = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time that text and JSON wait for the broker.")
    ] = 5.0,
    keys: KeysOption = None,
) -> None:
    """Show and steer a DiLoCo run in the terminal.

    Reads the feed of a running diloco-broker. Keys that change the run ask
    for confirmation and send a command to the broker's control address; ?
    lists all keys.
    """
    if not (timeout > 0 and math.isfinite(timeout)):
        fail(COMMAND, f"--timeout must be a positive number of seconds, got {timeout:g}")
    encoding = "ascii" if ascii_only else charset(sys.stdout.encoding)
    show = _show_json if as_json else partial(_show_text, encoding)
    healthy = True
    shown: Iterable[tuple[FeedModel, float]]
    try:
        history = None if replay is None else read_history(replay)
        is_screen = not (once or as_json or follow) and _is_terminal()
        key = None if replay is not None else keys_of(keys, steers=is_screen and not readonly)
        where = feed_of(address, feed, server, key)
        name = where if replay is None else str(replay)
        if is_screen:
            # Imported here: it is slow, and text and JSON do not need it.
            from diloco_tools.monitor.terminal.application import Top

            picture = Top(
                name,
                feed=None if history is not None else FeedSubscriber(name, keys=key),
                ask=partial(ask_once, keys=key),
                control=server,
                readonly=readonly,
                encoding=encoding,
                player=None if history is None else Player(history, time.monotonic),
                colour="NO_COLOR" not in os.environ,
            )
            if history is not None and history.skipped:
                picture.say(f"Skipped {history.skipped} damaged lines of the history.")
            picture.run()
            return
        if history is not None:
            moments = history if follow else history[-1:]
            shown = ((FeedModel(each.snapshot, each.at), each.at) for each in moments)
        else:
            subscriber = FeedSubscriber(where, keys=key)
            shown = _of_feed(subscriber, timeout, follow, reports_silence=not as_json)
        for number, (model, now) in enumerate(shown):
            if number and replay is None and not as_json:
                print()
            healthy = show(name, model, now)
    except (FeedError, UsageError) as error:
        fail(COMMAND, error)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(HEALTHY if healthy else DEGRADED)


def _of_feed(
    feed: FeedSubscriber, timeout: float, follow: bool, *, reports_silence: bool
) -> Iterator[tuple[FeedModel, float]]:
    """The model after the first or each snapshot, and the time."""
    model = FeedModel()
    shown: Freshness | None = None
    with feed:
        while True:
            snapshot = feed.receive(timeout if shown is None else POLL_S)
            now = time.monotonic()
            is_new = snapshot is not None and model.update(snapshot, now)
            if shown is None and not is_new:
                fail(COMMAND, _silence(feed, timeout))
            # Silence is reported twice: when the feed turns late, and when it turns stale.
            if is_new or (reports_silence and model.freshness(now) is not shown):
                shown = model.freshness(now)
                yield model, now
                if not follow:
                    return


def _show_json(name: str, model: FeedModel, now: float) -> bool:
    """Print one snapshot as JSON; returns whether the run is healthy."""
    snapshot, verdict = model.at(now), model.verdict(now)
    assert snapshot is not None
    made = {w.id: inner_step_now(snapshot, w, model.freshness(now)) for w in snapshot.workers}
    monitor = {
        "verdict": verdict.word,
        "reasons": verdict.reasons,
        "inner_steps": {name: steps for name, steps in made.items() if steps is not None},
    }
    print(json.dumps({**snapshot.raw, "monitor": monitor}), flush=True)
    return verdict.healthy


def _show_text(encoding: str, name: str, model: FeedModel, now: float) -> bool:
    """Print one screen of text; returns whether the run is healthy."""
    width = max(MIN_WIDTH, console().width)  # a narrower terminal wraps lines
    scene = Scene(model, RunSeries(), now, name)
    shown = console(width=width)
    with shown.capture() as captured:
        shown.print(screen(scene, width))
    print(fitted_to(encoding, captured.get()), end="", flush=True)
    return model.verdict(now).healthy


def _is_terminal() -> bool:
    """Whether the full screen can run: it needs input and output streams."""
    streams = (sys.stdin, sys.stdout, sys.__stderr__)
    return os.environ.get("TERM") not in ("dumb", "") and all(
        stream is not None and stream.isatty() for stream in streams
    )


def _silence(feed: FeedSubscriber, timeout_s: float) -> str:
    if feed.malformed:
        return (
            f"no snapshot from {feed.address} within {timeout_s:g} s: {feed.malformed} unreadable "
            f"({feed.last_error}); is this the feed of diloco-broker?"
        )
    if (problem := unknown_name(feed.address)) is not None:
        return f"no feed from {feed.address}: {problem}"
    return (
        f"no feed from {feed.address} within {timeout_s:g} s: start diloco-broker serve, or give "
        "the feed address that it printed (the control address has another port)"
    )


if __name__ == "__main__":
    app()
