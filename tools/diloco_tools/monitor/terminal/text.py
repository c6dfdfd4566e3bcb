"""The parts of a picture as Rich renderables, and the screen of `--once`. Pure.

Every condition has a sign beside its colour.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diloco_protocol.feed import INSECURE, Snapshot
from diloco_protocol.monitor.fields import (
    BAD,
    GOOD,
    LEVELS,
    TOP,
    UNEASY,
    Field,
    Part,
    columns,
    run_name,
)
from diloco_protocol.monitor.rows import Row, cells, rows_of
from diloco_protocol.quantities import NONE, duration, moment, parameters, plural
from diloco_tools.monitor.terminal.scene import Scene

QUIET = "dim"
STYLES = {"": "", GOOD: "green", UNEASY: "yellow", BAD: "red"}  # of tones
SIGNS = {GOOD: "●", UNEASY: "◐", BAD: "○"}
# Replacements of equal width for terminals without a sign.
ASCII = str.maketrans("●◐○—…→←▶↑↓▁▂▃▄▅▆▇█│─╭╮╰╯", "+!x-~><>^v_.:-=+*#|-++++")
LABEL = 12  # columns of a row's label and of an event's age, with the gap
MIN_WIDTH = 80
LAST_EVENTS, LAST_REJECTIONS = 5, 3
REASONS = 6  # of a degraded run; the table shows the rest
NAMED_REPLAY = 98  # columns from which the header of a replay has our name
# fmt: off
# Rows in the order of their importance in a small window; others follow as in `rows_of`.
FIRST = (
    "round", "pushes", "workers", "state", "rejected", "checkpoint", "commands", "end", "relays",
    "standby", "data", "outer", "broker", "last", "model",
)
# Columns that are dropped to fit a narrow window, the highest rank first; others stay.
RANKS = {
    "tokens": 9, "delta_norm": 9, "step": 8, "bytes_up": 7, "bytes_down": 7, "pushes": 6,
    "sync_age_s": 4, "rejected": 3, "via": 1, "state": 2, "rate_up": 1, "rate_down": 1,
}
# fmt: on
NAMES_FIRST = 3  # columns of this rank and above are dropped before a name is cut
LEAST = {"id": 8, "host": 6}  # columns that may be cut, and their least width
MOST = {"id": 32, "host": 24, "via": 24}


def charset(name: str | None) -> str:
    """The encoding of a terminal; ASCII if unknown."""
    try:
        return codecs.lookup(name or "utf-8").name
    except LookupError:
        return "ascii"


def fitted_to(encoding: str, text: str) -> str:
    """`text` with the characters that the encoding lacks replaced, in as many columns."""

    def known(sign: str) -> str:
        try:
            sign.encode(encoding)
        except UnicodeEncodeError:
            return "?" * cell_len(sign)
        return sign

    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return "".join(map(known, text.translate(ASCII)))
    return text


def styled(part: Part) -> Text:
    """A part of a row in its colour."""
    return Text(part.text, STYLES.get(part.tone, ""))


def marked(part: Part) -> Text:
    """A condition with its sign, which says the same as its colour."""
    return Text(f"{SIGNS.get(part.tone, SIGNS[UNEASY])} {part.text}", STYLES[part.tone])


def clipped(text: str, cells: int) -> str:
    """`text` in at most `cells` columns, cut in the middle: names differ at both ends."""
    if cell_len(text) <= cells:
        return text
    head = (cells - 1) // 2
    end = text[head + 1 - cells :] if cells > head + 1 else ""
    while cell_len(end) > cells - 1 - head:
        end = end[1:]
    return set_cell_size(text, head) + "…" + end if cells > 0 else ""


def on_one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def grid() -> Table:
    """A table of labels and values."""
    made = Table.grid(expand=True)
    made.add_column(width=LABEL, no_wrap=True)
    made.add_column(ratio=1)
    return made


def header(scene: Scene, width: int, *, is_coloured: bool = False) -> Table:
    """The name of the run on the left, the state of the feed on the right.

    Args:
        is_coloured: the whole line has a background colour, so the text must not.
    """
    snapshot = scene.model.snapshot
    words = []
    if snapshot is not None:
        name = run_name(snapshot)
        size = parameters(snapshot.model.parameters) if snapshot.model else ""
        words = [f"run {name}" if name else "no run yet", size, snapshot.mode]
    if scene.replay is None or width >= NAMED_REPLAY:
        words = ["diloco-top", clipped(scene.address, width // 3), *words]
    made = Table.grid(expand=True, padding=(0, 2, 0, 0))
    made.add_column(ratio=1, no_wrap=True)
    made.add_column(justify="right", no_wrap=True)
    feed = _feed(scene)
    left = on_one_line(Text("  ".join(filter(None, words))))
    made.add_row(left, Text(feed.plain) if is_coloured else feed)
    return made


def _feed(scene: Scene) -> Text:
    """The position of a replay, or the state of the feed."""
    if (replay := scene.replay) is not None:
        pace = f"▶ x{replay.speed}" if replay.playing else "stopped"
        place = f"{replay.index + 1}/{len(replay.moments)} {pace}"
        return Text(f"REPLAY {moment(scene.now)} UTC  {place}", STYLES[UNEASY])
    model, snapshot = scene.model, scene.model.snapshot
    is_open = snapshot is not None and snapshot.security == INSECURE
    said = [
        (INSECURE * is_open, f"bold {STYLES[BAD]}"),
        ("readonly" * scene.readonly, QUIET),
        (plural(model.restarts, "restart") if model.restarts else "", STYLES[UNEASY]),
        (f"{model.missed} missed" if model.missed else "", STYLES[UNEASY]),
    ]
    text = Text.assemble(*((f"{word}  ", style) for word, style in said if word))
    age = "" if snapshot is None else f" {duration(model.age_s(scene.now))}"
    return text + marked(Part(scene.fresh.name + age, scene.fresh.value))


def verdict(scene: Scene, most: int) -> Text:
    """The verdict, with at most `most` reasons, one per line."""
    found = scene.model.verdict(scene.now)
    text = marked(Part(found.word.upper(), GOOD if found.healthy else UNEASY))
    indent = " " * (text.cell_len + 2)
    for place, reason in enumerate(found.first(most)):
        text.append(f"\n{indent}" if place else "  ").append(reason, "default")
    return text


def rows_table(rows: Sequence[Row], *, wraps: bool) -> Table:
    """Rows; without `wraps` each on one line."""
    made = grid()
    for row in rows:
        parts = Text(", ").join(map(styled, row.parts))
        made.add_row(Text(row.label, QUIET), parts if wraps else on_one_line(parts))
    return made


def rows_for(snapshot: Snapshot, most: int | None = None) -> list[Row]:
    """The `most` important rows, in their order, without the state "training"."""
    rows = [row for row in rows_of(snapshot, TOP) if row.text != "training"]
    if most is None or len(rows) <= most:
        return rows
    places = {label: place for place, label in enumerate(FIRST)}
    first = sorted(rows, key=lambda row: places.get(row.label, len(FIRST)))[: max(0, most)]
    return [row for row in rows if row in first]


def log_table(snapshot: Snapshot, most: int, *, wraps: bool = True) -> Table:
    """Ages and texts of the newest rejections and events, the newest last."""
    rejections = sorted(snapshot.rejections, key=lambda each: each.age_s)[:LAST_REJECTIONS]
    found = [
        (each.age_s, 0, f"rejected {each.worker}: {each.text or each.code}", UNEASY)
        for each in rejections
    ]
    for event in snapshot.events:
        said = event.text if event.level == "info" else f"{event.level}: {event.text}"
        found.append((event.age_s, event.sequence, said, LEVELS.get(event.level, UNEASY)))
    made = grid()
    for age_s, _, said, tone in sorted(found, key=lambda each: (-each[0], each[1]))[-most:]:
        text = Text(said, STYLES[tone])
        age = Text(f"{duration(age_s):>6} ago", QUIET)
        made.add_row(age, text if wraps else on_one_line(text))
    return made


def no_workers(snapshot: Snapshot) -> str:
    return "all workers have left" if snapshot.ended else "no workers yet"


@dataclass(frozen=True)
class Column:
    """A column of the table and its width."""

    field: Field
    width: int

    def title(self, *, is_sorted: bool) -> Text:
        return self._placed(Text(self.field.title.upper(), "bold" if is_sorted else QUIET))

    def shown(self, part: Part) -> Text:
        if self.field.path == "health":
            return self._placed(marked(part))
        return self._placed(styled(part._replace(text=clipped(part.text, self.width))))

    def _placed(self, text: Text) -> Text:
        text.truncate(self.width)
        text.align("left" if self.field.format == "text" else "right", self.width)
        return text


def fitted(rows: Sequence[dict[str, Part]], width: int) -> list[Column]:
    """The columns that fit into `width`, with one blank between them."""

    def natural(field: Field) -> int:
        widest = max((cell_len(row[field.path].text) for row in rows), default=0)
        widest += 2 * (field.path == "health")  # its sign
        return max(min(widest, MOST.get(field.path, 16)), len(field.title))

    kept = [
        field
        for field in columns(TOP)
        if field.path not in RANKS or any(row[field.path].text not in ("", NONE) for row in rows)
    ]
    sizes = {field.path: natural(field) for field in kept}

    def excess(least: dict[str, int]) -> int:
        """By how much the columns are too wide, with names cut to these widths."""
        widths = (min(sizes[field.path], least.get(field.path, 999)) for field in kept)
        return sum(widths) + len(kept) - 1 - width

    ranks = [RANKS.get(field.path, 0) for field in kept]
    while (worst := max(ranks)) and excess(LEAST if worst < NAMES_FIRST else {}) > 0:
        last = len(ranks) - 1 - ranks[::-1].index(worst)
        del kept[last], ranks[last]
    while excess({}) > 0 and any(sizes[path] > least for path, least in LEAST.items()):
        longest = max(LEAST, key=lambda path: sizes[path] if sizes[path] > LEAST[path] else 0)
        sizes[longest] -= 1
    return [Column(field, sizes[field.path]) for field in kept]


def screen(scene: Scene, width: int) -> Group:
    """The picture of `--once`; `width` is at least `MIN_WIDTH`."""
    snapshot = scene.snapshot()
    parts: list[RenderableType] = [header(scene, width), verdict(scene, REASONS)]
    if snapshot is None:
        return Group(*parts)
    parts += [rows_table(rows_for(snapshot), wraps=True), ""]
    if snapshot.listed:
        workers = scene.listed(sorted(snapshot.listed, key=lambda worker: worker.id))
        rows = [cells(each, TOP) for each in workers]
        shown = fitted(rows, width)
        parts.append(Text(" ").join(each.title(is_sorted=False) for each in shown))
        for row in rows:
            parts.append(Text(" ").join(each.shown(row[each.field.path]) for each in shown))
    else:
        parts.append(Text(no_workers(snapshot), QUIET))
    if snapshot.events or snapshot.rejections:
        parts += ["", log_table(snapshot, LAST_EVENTS)]
    return Group(*parts)
