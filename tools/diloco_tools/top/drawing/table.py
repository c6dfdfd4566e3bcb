"""The table of workers: which columns have room, how wide they are, what stands in them. Pure.

Columns are dropped by rank where the width does not hold all of them, and names are cut in the middle.
Rank 0 always stays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.text import Text

from diloco_protocol.feed import Worker
from diloco_tools.feed.estimate import MARK
from diloco_tools.feed.series import Rate
from diloco_tools.top.drawing.notation import (
    QUIET,
    UNEASY,
    Glyphs,
    byte_size,
    duration,
    health_mark,
    number,
    scaled,
)

SPARK = 10  # columns of a worker's speed over time


@dataclass(frozen=True)
class Row:
    """A worker, and what is known of it beside the feed: its inner steps by now, if the last report is
    old; bytes a second; steps a second so far.
    """

    worker: Worker
    inner: int | None = None  # an estimate of its inner steps
    rate: Rate | None = None
    speeds: Sequence[float] = field(default=())


Cell = tuple[str, str]  # text and style


@dataclass(frozen=True)
class Column:
    """A column of the table. `least` and `most` bound a name that may be cut; None: never cut.

    `size` is the width that it has at least, so that a table does not move with each figure.
    """

    title: str
    cell: Callable[[Row, Glyphs], Cell]
    rank: int = 0
    left: bool = False
    least: int | None = None
    most: int | None = None
    size: int = 0


@dataclass(frozen=True)
class Table:
    """The chosen columns with their widths, and the lines under them."""

    columns: Sequence[tuple[Column, int]]
    header: Text
    lines: list[Text]


def lay_out(
    columns: Sequence[Column],
    rows: Sequence[Row],
    width: int,
    glyphs: Glyphs,
    *,
    names_first: int,
    emphasised: str = "",
) -> Table:
    """The table in `width` columns. `names_first`: columns of this rank and above give way before a
    name is cut. `emphasised` is the title of the column that the rows are sorted by.
    """
    cells = {column.title: [column.cell(row, glyphs) for row in rows] for column in columns}
    sizes = {column.title: _natural(column, cells[column.title]) for column in columns}
    kept = list(columns)

    def excess(cut: bool) -> int:
        smallest = (
            min(sizes[c.title], c.least) if cut and c.least is not None else sizes[c.title]
            for c in kept
        )
        return sum(smallest) + len(kept) - 1 - width

    while (worst := max(column.rank for column in kept)) and excess(worst < names_first) > 0:
        del kept[max(i for i, column in enumerate(kept) if column.rank == worst)]
    over = excess(False)
    while over > 0:
        longest = max(
            (c for c in kept if c.least is not None and sizes[c.title] > c.least),
            key=lambda c: sizes[c.title],
            default=None,
        )
        if longest is None:
            break
        sizes[longest.title] -= 1
        over -= 1
    chosen = [(column, sizes[column.title]) for column in kept]
    titles = [(c.title, "bold" if c.title == emphasised else QUIET) for c in kept]
    lines = [
        _line([cells[column.title][row] for column in kept], chosen, width, glyphs)
        for row in range(len(rows))
    ]
    return Table(chosen, _line(titles, chosen, width, glyphs), lines)


def _natural(column: Column, cells: Sequence[Cell]) -> int:
    widest = max((cell_len(text) for text, _ in cells), default=0)
    if column.most is not None:
        widest = min(widest, column.most)
    return max(widest, cell_len(column.title), column.size)


def _line(
    cells: Sequence[Cell], columns: Sequence[tuple[Column, int]], width: int, glyphs: Glyphs
) -> Text:
    line = Text()
    for (column, size), (text, style) in zip(columns, cells, strict=True):
        shown = glyphs.clip(text, size)
        pad = " " * (size - cell_len(shown))
        line.append(" " if line.plain else "")
        line.append(shown + pad if column.left else pad + shown, style)
    line.truncate(width)  # a state or a health of absurd length
    line.rstrip()
    return line


def plain(text: str) -> Cell:
    return text, ""


def name(row: Row, glyphs: Glyphs) -> Cell:
    return plain(glyphs.printable(row.worker.id))


def host(row: Row, glyphs: Glyphs) -> Cell:
    return plain(glyphs.printable(row.worker.host))


def health(row: Row, glyphs: Glyphs) -> Cell:
    return health_mark(row.worker.health, glyphs)


def state(row: Row, glyphs: Glyphs) -> Cell:
    """What it does; of a lost worker nobody knows, here and in the next two."""
    lost = row.worker.health == "lost"
    return plain(glyphs.none if lost else glyphs.printable(row.worker.state))


def inner(row: Row, glyphs: Glyphs) -> Cell:
    """Inner steps since the last boundary, of H, which Dynamic Local Updates set for each worker."""
    worker = row.worker
    if worker.health == "lost":
        return plain(glyphs.none)
    steps = str(worker.inner_step) if row.inner is None else f"{MARK}{row.inner}"
    return plain(f"{steps}/{worker.sync_every}")


def speed(row: Row, glyphs: Glyphs) -> Cell:
    worker = row.worker
    known = worker.steps_per_s is not None and worker.health != "lost"
    return plain(scaled(worker.steps_per_s or 0.0) if known else glyphs.none)


def speeds(row: Row, glyphs: Glyphs) -> Cell:
    return glyphs.spark(row.speeds, SPARK), QUIET


def last_round(row: Row, glyphs: Glyphs) -> Cell:
    return plain(glyphs.none if row.worker.round is None else str(row.worker.round))


def loss(row: Row, glyphs: Glyphs) -> Cell:
    if not row.worker.loss_is_finite:
        return "nan", UNEASY
    return plain(number(row.worker.loss, glyphs.none))


def staleness(row: Row, _: Glyphs) -> Cell:
    return plain(str(row.worker.staleness))


def rejected(row: Row, _: Glyphs) -> Cell:
    return str(row.worker.rejected), UNEASY if row.worker.rejected else ""


def synced(row: Row, glyphs: Glyphs) -> Cell:
    age = row.worker.sync_age_s
    return plain(glyphs.none if age is None else duration(age))


def sending(row: Row, glyphs: Glyphs) -> Cell:
    return plain(glyphs.none if row.rate is None else byte_size(row.rate.up))


def receiving(row: Row, glyphs: Glyphs) -> Cell:
    return plain(glyphs.none if row.rate is None else byte_size(row.rate.down))


ONE_SCREEN = (
    Column("WORKER", name, left=True, least=8),
    Column("HEALTH", health, left=True),
    Column("STATE", state, left=True),
    Column("ROUND", last_round),
    Column("INNER", inner),
    Column("STEP/S", speed, rank=1),
    Column("LOSS", loss, rank=1),
    Column("BEAT", lambda r, _: plain(duration(r.worker.beat_age_s))),
    Column("STALE", staleness, rank=2),
    Column("UP", lambda r, _: plain(byte_size(r.worker.bytes_up)), rank=1),
    Column("DOWN", lambda r, _: plain(byte_size(r.worker.bytes_down)), rank=1),
    Column("PUSHES", lambda r, _: plain(str(r.worker.pushes)), rank=4),
    Column("REJ", rejected, rank=3),
    Column("TOKENS", lambda r, _: plain(scaled(r.worker.tokens)), rank=5),
    Column("HOST", host, rank=6, left=True),
)
FULL_SCREEN = (
    Column("WORKER", name, left=True, least=8, most=32),
    Column("HEALTH", health, left=True, size=6),
    Column("HOST", host, left=True, least=6, most=24),
    Column("STATE", state, rank=1, left=True, size=8),
    Column("ROUND", last_round, size=5),
    Column("INNER/H", inner, size=7),
    Column("ST/S", speed, size=4),
    Column("SPEED", speeds, rank=4, left=True, size=SPARK),
    Column("LOSS", loss, size=5),
    Column("BEAT", lambda r, _: plain(duration(r.worker.beat_age_s)), size=4),
    Column("SYNC", synced, rank=3, size=4),
    Column("OLD", staleness, size=3),
    Column("TX/S", sending, size=6),
    Column("RX/S", receiving, size=6),
    Column("SENT", lambda r, _: plain(byte_size(r.worker.bytes_up)), rank=6, size=6),
    Column("GOT", lambda r, _: plain(byte_size(r.worker.bytes_down)), rank=6, size=6),
    Column("PUSHES", lambda r, _: plain(str(r.worker.pushes)), rank=5),
    Column("REJ", rejected, rank=2),
    Column("STEP", lambda r, _: plain(scaled(r.worker.step)), rank=7, size=5),
    Column("TOKENS", lambda r, _: plain(scaled(r.worker.tokens)), rank=8),
)
