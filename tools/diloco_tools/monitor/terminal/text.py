"""The parts of a picture as Rich renderables, and the one screen of `--once`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diloco_protocol.feed import INSECURE, Snapshot
from diloco_protocol.monitor import tree
from diloco_protocol.monitor.fields import BAD, GOOD, TOP, UNEASY, run_name
from diloco_protocol.monitor.rows import Row, cells, rows_of
from diloco_protocol.quantities import duration, parameters, plural
from diloco_tools.monitor.terminal.glyphs import FRESHNESS, LEVELS, QUIET, STYLES, Glyphs
from diloco_tools.monitor.terminal.scene import Scene
from diloco_tools.monitor.terminal.table import fitted

LABEL = 12  # columns of a row's label and of an event's age, the gap included
MIN_WIDTH = 80
LAST_EVENTS, LAST_REJECTIONS = 5, 3
REASONS = 6  # of a degraded run; the table has the rest
NAMED_REPLAY = 98  # columns from which the header of a replay has room for our name
# Rows that a small window shows first; the others follow in the order of `rows_of`.
# fmt: off
FIRST = (
    "round", "pushes", "missing", "workers", "state", "rejected", "checkpoint", "commands", "end",
    "parent", "standby", "data", "outer", "broker", "last", "model",
)
# fmt: on


def grid() -> Table:
    """Labels at the left, the rest beside them."""
    made = Table.grid(expand=True)
    made.add_column(width=LABEL, no_wrap=True)
    made.add_column(ratio=1)
    return made


def header(scene: Scene, width: int, glyphs: Glyphs, *, is_coloured: bool = False) -> Table:
    """Whose run this is, and at the other end how much to believe of it.

    Args:
        is_coloured: the whole line has a colour, on which no other can be read.
    """
    snapshot = scene.model.snapshot
    words = []
    if snapshot is not None:
        name = run_name(snapshot)
        size = parameters(snapshot.model.parameters) if snapshot.model else ""
        words = [f"run {name}" if name else "no run yet", size, snapshot.mode]
    if scene.replay is None or width >= NAMED_REPLAY:
        words = ["diloco-top", glyphs.clip(scene.address, width // 3), *words]
    left = _on_one_line(Text(glyphs.printable("  ".join(filter(None, words)))), glyphs)
    made = Table.grid(expand=True, padding=(0, 2, 0, 0))
    made.add_column(ratio=1, no_wrap=True)
    made.add_column(justify="right", no_wrap=True)
    feed = _feed(scene, glyphs)
    made.add_row(left, Text(feed.plain) if is_coloured else feed)
    return made


def _feed(scene: Scene, glyphs: Glyphs) -> Text:
    """Where a replay is, or what is known of the feed."""
    if (replay := scene.replay) is not None:
        pace = f"{glyphs.play} x{replay.speed}" if replay.playing else "stopped"
        place = f"{replay.index + 1}/{len(replay.moments)} {pace}"
        return Text(f"REPLAY {replay.time_of_day}  {place}", STYLES[UNEASY])
    text, snapshot = Text(), scene.model.snapshot
    if snapshot is not None and snapshot.security == INSECURE:
        text.append(f"{INSECURE}  ", f"bold {STYLES[BAD]}")
    if scene.readonly:
        text.append("readonly  ", QUIET)
    if scene.frozen_s is not None:
        text.append(f"FROZEN {duration(scene.frozen_s)}  ", STYLES[UNEASY])
    if scene.model.restarts:
        text.append(plural(scene.model.restarts, "restart") + "  ", STYLES[UNEASY])
    if scene.model.missed:
        text.append(f"{scene.model.missed} missed  ", STYLES[UNEASY])
    age = "" if scene.model.snapshot is None else f" {duration(scene.age_s)}"
    return text + glyphs.marked(scene.fresh.name + age, FRESHNESS[scene.fresh])


def verdict(scene: Scene, most: int, glyphs: Glyphs) -> Text:
    """How the run is, with at most `most` reasons, each on a line of its own."""
    found = scene.model.verdict(scene.now)
    text = glyphs.marked(found.word.upper(), GOOD if found.healthy else UNEASY)
    reasons, indent = list(found.reasons), " " * (text.cell_len + 2)
    if len(reasons) > most:
        reasons[most - 1 :] = [f"and {len(reasons) - most + 1} more"]
    for place, reason in enumerate(reasons):
        text.append(f"\n{indent}" if place else "  ").append(glyphs.printable(reason), "default")
    return text


def rows_table(rows: Sequence[Row], glyphs: Glyphs, *, wraps: bool) -> Table:
    """Rows, each on as many lines as it needs or (without `wraps`) on one."""
    made = grid()
    for row in rows:
        parts = Text(", ").join(glyphs.text(part) for part in row.parts)
        made.add_row(Text(row.label, QUIET), parts if wraps else _on_one_line(parts, glyphs))
    return made


def rows_for(snapshot: Snapshot, most: int | None = None) -> list[Row]:
    """The rows of a run that trains need not say so; the `most` that come first, in their order."""
    rows = [row for row in rows_of(snapshot, TOP) if row.text != "training"]
    if most is None or len(rows) <= most:
        return rows
    places = {label: place for place, label in enumerate(FIRST)}
    first = sorted(rows, key=lambda row: places.get(row.label, len(FIRST)))[: max(0, most)]
    return [row for row in rows if row in first]


def log(snapshot: Snapshot, most: int, glyphs: Glyphs) -> list[tuple[str, Text]]:
    """Ages and sentences of the newest rejections and events, the newest last."""
    rejections = sorted(snapshot.rejections, key=lambda each: each.age_s)[:LAST_REJECTIONS]
    found = [
        (each.age_s, 0, f"rejected {each.worker}: {each.text or each.code}", UNEASY)
        for each in rejections
    ]
    for event in snapshot.events:
        said = event.text if event.level == "info" else f"{event.level}: {event.text}"
        found.append((event.age_s, event.sequence, said, LEVELS.get(event.level, UNEASY)))
    newest = sorted(found, key=lambda each: (-each[0], each[1]))[-most:] if most else []
    return [
        (glyphs.printable(f"{duration(age_s):>6} ago"), Text(glyphs.printable(said), STYLES[tone]))
        for age_s, _, said, tone in newest
    ]


def log_table(snapshot: Snapshot, most: int, glyphs: Glyphs, *, wraps: bool = True) -> Table:
    made = grid()
    for age, said in log(snapshot, most, glyphs):
        made.add_row(Text(age, QUIET), said if wraps else _on_one_line(said, glyphs))
    return made


def _on_one_line(text: Text, glyphs: Glyphs) -> Text:
    text.no_wrap, text.overflow = True, "crop" if glyphs.is_ascii else "ellipsis"
    return text


def no_workers(snapshot: Snapshot) -> str:
    return "all workers have left" if snapshot.ended else "no workers yet"


def screen(scene: Scene, width: int, glyphs: Glyphs) -> Group:
    """The whole picture of `--once`; `width` is at least `MIN_WIDTH`."""
    snapshot = scene.snapshot()
    parts: list[RenderableType] = [header(scene, width, glyphs), verdict(scene, REASONS, glyphs)]
    if snapshot is None:
        return Group(*parts)
    parts += [rows_table(rows_for(snapshot), glyphs, wraps=True), ""]
    if snapshot.listed:
        workers = scene.listed(tree.arranged(snapshot.listed, lambda worker: worker.id))
        rows = [cells(each, TOP) for each in workers]
        columns = fitted(rows, width)
        parts.append(Text(" ").join(each.title(is_sorted=False) for each in columns))
        for row in rows:
            shown = (each.shown(row[each.field.path], glyphs) for each in columns)
            parts.append(Text(" ").join(shown))
    else:
        parts.append(Text(no_workers(snapshot), QUIET))
    if snapshot.events or snapshot.rejections:
        parts += ["", log_table(snapshot, LAST_EVENTS, glyphs)]
    return Group(*parts)
