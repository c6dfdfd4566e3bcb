"""diloco-top as text: the real command on a fake feed, or one screen drawn from a snapshot."""

import difflib
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from typer.testing import CliRunner, Result

from diloco_protocol.feed import parse_snapshot
from diloco_tools.monitor.feed.model import FeedModel
from diloco_tools.monitor.feed.series import RunSeries
from diloco_tools.monitor.terminal.cli import app
from diloco_tools.monitor.terminal.scene import Scene
from diloco_tools.monitor.terminal.text import fitted_to, screen
from kit.feed_snapshots import PATIENCE_S, Publisher, frame
from kit.paths import ROOT

SNAPSHOTS = ROOT / "tests" / "tools" / "snapshots"
UPDATE = "DILOCO_UPDATE_SNAPSHOTS"  # set it to write what is drawn now, and look at the difference


@contextmanager
def sending(publisher: Publisher, *payloads: bytes) -> Iterator[str]:
    """A thread sends `payloads` to the next subscriber; gives the address to subscribe to."""

    def send() -> None:
        publisher.await_subscriber()
        publisher.send(*payloads)

    with ThreadPoolExecutor(1) as beside:
        sent = beside.submit(send)
        yield publisher.address
        sent.result()


def top(*arguments: str, charset: str = "utf-8", **environment: str) -> Result:
    clean: dict[str, str | None] = dict.fromkeys(
        ("NO_COLOR", "FORCE_COLOR", "DILOCO_FEED", "TTY_COMPATIBLE"), None
    )
    plain = clean | {"COLUMNS": "80", "TERM": "xterm-256color"} | environment
    return CliRunner(charset=charset, env=plain).invoke(app, list(arguments))


def top_of(publisher: Publisher, document: Any, *arguments: str, **environment: str) -> Result:
    with sending(publisher, frame(document)) as address:
        return top(address, "--once", "--timeout", str(PATIENCE_S), *arguments, **environment)


def drawn(
    document: Any,
    width: int = 80,
    encoding: str = "utf-8",
    later_s: float = 0.0,
    address: str = "tcp://127.0.0.1:8513",
) -> str:
    model, now = FeedModel(parse_snapshot(frame(document)), 5.0), 5.0 + later_s
    shown = plain(screen(scene(model, now, address=address), width), width)
    return fitted_to(encoding, shown)


def plain(shown: RenderableType, width: int) -> str:
    """Lines without the blanks at their ends."""
    console = Console(file=io.StringIO(), width=width, color_system=None, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def scene(model: FeedModel, now: float, **keys: Any) -> Scene:
    """What is known of a live feed at `now`."""
    whole: dict[str, Any] = {"address": "tcp://127.0.0.1:8513", "series": RunSeries()} | keys
    return Scene(model=model, now=now, **whole)


def matches(name: str, text: str) -> None:
    path = SNAPSHOTS / name
    text += "\n"
    if UPDATE in os.environ:
        path.write_text(text, encoding="utf-8")
    stored = path.read_text(encoding="utf-8") if path.exists() else ""
    difference = difflib.unified_diff(stored.splitlines(), text.splitlines(), "stored", "drawn")
    assert stored == text, f"{name}, see {UPDATE}:\n" + "\n".join(difference)
