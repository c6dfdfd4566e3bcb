"""The table of workers: which columns have room, how wide they are, what stands in them. Pure.

Columns are dropped by rank where the width does not hold all of them, and names are cut in the middle.
Rank 0 always stays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

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
from diloco_tools.top.drawing.sheet import Sheet

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

    @property
    def lost(self) -> bool:
        """Nobody knows what it does."""
        return self.worker.health == "lost"


Cell = str | tuple[str, str] | None  # text, or text and style; None: it is not known


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

    def shown(self, row: Row, glyphs: Glyphs) -> tuple[str, str]:
        """Text and style of one row."""
        cell = self.cell(row, glyphs)
        return cell if isinstance(cell, tuple) else (glyphs.none if cell is None else cell, "")


@dataclass(frozen=True)
class Table:
    """The titles of the chosen columns, and a line for each row."""

    header: Text
    lines: list[Text]


def lay_out(
    columns: Sequence[Column],
    rows: Sequence[Row],
    sheet: Sheet,
    *,
    names_first: int,
    emphasised: str = "",
) -> Table:
    """The table. `names_first`: columns of this rank and above give way before a name is cut.
    `emphasised` is the title of the column that the rows are sorted by.
    """
    cells = {column.title: [column.shown(row, sheet.glyphs) for row in rows] for column in columns}
    sizes = {column.title: _natural(column, cells[column.title]) for column in columns}
    kept = list(columns)

    def excess(cut: bool) -> int:
        smallest = (
            min(sizes[c.title], c.least) if cut and c.least is not None else sizes[c.title]
            for c in kept
        )
        return sum(smallest) + len(kept) - 1 - sheet.width

    while (worst := max(column.rank for column in kept)) and excess(worst < names_first) > 0:
        del kept[max(i for i, column in enumerate(kept) if column.rank == worst)]
    for _ in range(excess(False)):
        names = [c for c in kept if c.least is not None and sizes[c.title] > c.least]
        if not names:
            break
        sizes[max(names, key=lambda c: sizes[c.title]).title] -= 1
    chosen = [(column, sizes[column.title]) for column in kept]
    titles = [(c.title, "bold" if c.title == emphasised else QUIET) for c in kept]
    lines = [
        _line([cells[column.title][row] for column in kept], chosen, sheet)
        for row in range(len(rows))
    ]
    return Table(_line(titles, chosen, sheet), lines)


def _natural(column: Column, cells: Sequence[tuple[str, str]]) -> int:
    widest = max((cell_len(text) for text, _ in cells), default=0)
    if column.most is not None:
        widest = min(widest, column.most)
    return max(widest, cell_len(column.title), column.size)


def _line(
    cells: Sequence[tuple[str, str]], columns: Sequence[tuple[Column, int]], sheet: Sheet
) -> Text:
    line = Text()
    for (column, size), (text, style) in zip(columns, cells, strict=True):
        shown = sheet.glyphs.clip(text, size)
        pad = " " * (size - cell_len(shown))
        line.append(" " if line.plain else "")
        line.append(shown + pad if column.left else pad + shown, style)
    line.truncate(sheet.width)  # a state or a health of absurd length
    line.rstrip()
    return line


def _inner(row: Row, _: Glyphs) -> Cell:
    """Inner steps since the last boundary, of H, which Dynamic Local Updates set for each worker."""
    worker = row.worker
    steps = worker.inner_step if row.inner is None else f"{MARK}{row.inner}"
    return None if row.lost else f"{steps}/{worker.sync_every}"


def _speed(row: Row, _: Glyphs) -> Cell:
    pace = row.worker.steps_per_s
    return None if pace is None or row.lost else scaled(pace)


def _loss(row: Row, glyphs: Glyphs) -> Cell:
    worker = row.worker
    return number(worker.loss, glyphs.none) if worker.loss_is_finite else ("nan", UNEASY)


def _synced(row: Row, _: Glyphs) -> Cell:
    age_s = row.worker.sync_age_s
    return None if age_s is None else duration(age_s)


NAME = Column("WORKER", lambda r, g: g.printable(r.worker.id), left=True, least=8)
HEALTH = Column("HEALTH", lambda r, g: health_mark(r.worker.health, g), left=True)
HOST = Column("HOST", lambda r, g: g.printable(r.worker.host), left=True)
STATE = Column("STATE", lambda r, g: None if r.lost else g.printable(r.worker.state), left=True)
ROUND = Column("ROUND", lambda r, _: None if r.worker.round is None else str(r.worker.round))
INNER = Column("INNER", _inner)
SPEED = Column("STEP/S", _speed)
LOSS = Column("LOSS", _loss)
BEAT = Column("BEAT", lambda r, _: duration(r.worker.beat_age_s))
STALE = Column("STALE", lambda r, _: str(r.worker.staleness))
UP = Column("UP", lambda r, _: byte_size(r.worker.bytes_up))
DOWN = Column("DOWN", lambda r, _: byte_size(r.worker.bytes_down))
PUSHES = Column("PUSHES", lambda r, _: str(r.worker.pushes))
REJECTED = Column("REJ", lambda r, _: (str(r.worker.rejected), UNEASY if r.worker.rejected else ""))
TOKENS = Column("TOKENS", lambda r, _: scaled(r.worker.tokens))

ONE_SCREEN = (
    NAME,
    HEALTH,
    STATE,
    ROUND,
    INNER,
    replace(SPEED, rank=1),
    replace(LOSS, rank=1),
    BEAT,
    replace(STALE, rank=2),
    replace(UP, rank=1),
    replace(DOWN, rank=1),
    replace(PUSHES, rank=4),
    replace(REJECTED, rank=3),
    replace(TOKENS, rank=5),
    replace(HOST, rank=6),
)
FULL_SCREEN = (
    replace(NAME, most=32),
    replace(HEALTH, size=6),
    replace(HOST, least=6, most=24),
    replace(STATE, rank=1, size=8),
    replace(ROUND, size=5),
    replace(INNER, title="INNER/H", size=7),
    replace(SPEED, title="ST/S", size=4),
    Column("SPEED", lambda r, g: (g.spark(r.speeds, SPARK), QUIET), rank=4, left=True, size=SPARK),
    replace(LOSS, size=5),
    replace(BEAT, size=4),
    Column("SYNC", _synced, rank=3, size=4),
    replace(STALE, title="OLD", size=3),
    Column("TX/S", lambda r, _: byte_size(r.rate.up) if r.rate else None, size=6),
    Column("RX/S", lambda r, _: byte_size(r.rate.down) if r.rate else None, size=6),
    replace(UP, title="SENT", rank=6, size=6),
    replace(DOWN, title="GOT", rank=6, size=6),
    replace(PUSHES, rank=5),
    replace(REJECTED, rank=2),
    Column("STEP", lambda r, _: scaled(r.worker.step), rank=7, size=5),
    replace(TOKENS, rank=8),
)
