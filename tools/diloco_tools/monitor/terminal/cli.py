"""The command diloco-top: the full screen, or one screen of text, or JSON."""

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

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
from diloco_tools.monitor.terminal.look import charset, fitted_to
from diloco_tools.monitor.terminal.scene import Player, Scene
from diloco_tools.monitor.terminal.text import MIN_WIDTH, screen
from diloco_tools.terminal import KeysOption, console, fail, keys_of

HEALTHY, DEGRADED, NO_FEED, INTERRUPTED = 0, 1, 2, 130
LOOK_S = 1.0  # with --follow: how soon a feed that falls silent is noticed

app = App()


@app.command(
    epilog="Exit codes: 0 the run is healthy or has ended (or the full screen was left), 1 it is "
    "degraded or has not begun (the reasons are printed), 2 no feed within --timeout, or the command "
    "line cannot work."
)
def top(  # noqa: PLR0913  each is an option
    *,
    address: FeedArgument = None,
    feed: FeedOption = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Print one screen of text and exit; so does an output that is no terminal.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one snapshot as one JSON object, with the verdict under monitor.",
        ),
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="With --json or --once: go on, a line or a screen for each snapshot.",
        ),
    ] = False,
    readonly: Annotated[
        bool, typer.Option("--readonly", help="No key changes the run; the screen says so.")
    ] = False,
    ascii_only: Annotated[
        bool, typer.Option("--ascii", help="Draw with ASCII signs only.")
    ] = False,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Show a past run: the history.jsonl in the folder that the broker saved to.",
        ),
    ] = None,
    server: FeedServerOption = None,
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="How long text and JSON wait for the broker."),
    ] = 5.0,
    keys: KeysOption = None,
) -> None:
    """Show a DiLoCo run in the terminal: its round, its workers, its traffic; and steer it.

    Reads the feed of a running diloco-broker. Keys that change the run ask
    before, and send the change to the broker's control address; ? lists all
    keys.
    """
    if not (timeout > 0 and math.isfinite(timeout)):
        _fail(f"--timeout {timeout:g} is no time to wait: give a number of seconds above 0")
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
            # Only now: it takes a while to import, and text and JSON do without it.
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
                picture.say(f"{history.skipped} damaged lines of the history were left out.")
            picture.run()
            return
        if history is not None:
            moments = history if follow else history[-1:]
            shown = ((FeedModel(each.snapshot, each.at), each.at) for each in moments)
        else:
            subscriber = FeedSubscriber(where, keys=key)
            shown = _of_feed(subscriber, timeout, follow, tells_of_silence=not as_json)
        for number, (model, now) in enumerate(shown):
            if number and replay is None and not as_json:
                print()
            healthy = show(name, model, now)
    except (FeedError, UsageError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(HEALTHY if healthy else DEGRADED)


def _of_feed(
    feed: FeedSubscriber, timeout: float, follow: bool, *, tells_of_silence: bool
) -> Iterator[tuple[FeedModel, float]]:
    """What arrives, the first or all, as of a time of our clock."""
    model = FeedModel()
    told: Freshness | None = None
    with feed:
        while True:
            snapshot = feed.receive(timeout if told is None else LOOK_S)
            now = time.monotonic()
            is_news = snapshot is not None and model.update(snapshot, now)
            if told is None and not is_news:
                _fail(_silence(feed, timeout))
            # Silence is news for people, too: once when the feed turns late, once when it turns stale.
            if is_news or (tells_of_silence and model.freshness(now) is not told):
                told = model.freshness(now)
                yield model, now
                if not follow:
                    return


def _show_json(name: str, model: FeedModel, now: float) -> bool:
    """Print one snapshot for programs; whether the run is healthy."""
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
    """Print one screen for people; whether the run is healthy."""
    width = max(MIN_WIDTH, console().width)  # a narrower terminal wraps lines, and loses nothing
    scene = Scene(model, RunSeries(), now, name)
    shown = console(width=width)
    with shown.capture() as captured:
        shown.print(screen(scene, width))
    print(fitted_to(encoding, captured.get()), end="", flush=True)
    return model.verdict(now).healthy


def _is_terminal() -> bool:
    """Whether a full screen can be drawn: it reads from one stream and draws on another."""
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


def _fail(sentence: str) -> NoReturn:
    fail("diloco-top", sentence, NO_FEED)


if __name__ == "__main__":
    app()
