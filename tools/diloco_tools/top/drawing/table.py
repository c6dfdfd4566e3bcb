"""The table of workers: which columns have room, how wide they are, what stands in them. Pure.

Columns are dropped by rank where the width does not hold all of them, and names are cut in the middle.
Rank 0 always stays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.text import Text

from diloco_protocol.feed import DEAD, Snapshot, Worker
from diloco_tools.monitor.feed.model import Freshness, inner_step_now
from diloco_tools.monitor.feed.series import Rate, RunSeries
from diloco_tools.top.drawing import notation
from diloco_tools.top.drawing.notation import QUIET, UNEASY, Glyphs, byte_size, duration, scaled
from diloco_tools.top.drawing.sheet import Sheet

SPARK = 10  # columns of a worker's speed over time
STANDS_OUT = 5.0  # times the usual norm, after which the broker warns of a push
INDENT = "  "  # of a worker below its relay
MARK = "~"  # before a number that nobody has told
Shown = tuple[str, str]  # text and style
Cell = str | Shown | None  # None: it is not known


@dataclass(frozen=True)
class Row:
    """A worker, and what is known of it beside the feed."""

    worker: Worker
    inner: int | None  # an estimate of its inner steps, if the last report is old
    rate: Rate | None  # bytes a second
    speeds: Sequence[float]  # steps a second so far

    @property
    def lost(self) -> bool:
        """Nobody knows what it does."""
        return self.worker.health in ("lost", DEAD)


@dataclass(frozen=True)
class Column:
    """A column of the table. `least` and `most` bound a name that may be cut; None: never cut."""

    title: str
    cell: Callable[[Row, Glyphs], Cell]
    rank: int = 0
    left: bool = False
    least: int | None = None
    most: int | None = None
    size: int = 0  # its width at least, so that a table does not move with each figure

    def shown(self, row: Row, glyphs: Glyphs) -> Shown:
        cell = self.cell(row, glyphs)
        return cell if isinstance(cell, tuple) else (glyphs.none if cell is None else cell, "")

    def natural(self, cells: Sequence[Shown]) -> int:
        """How wide it is where there is room for all."""
        widest = max((cell_len(text) for text, _ in cells), default=0)
        widest = widest if self.most is None else min(widest, self.most)
        return max(widest, cell_len(self.title), self.size)


def rows_of(
    workers: Sequence[Worker], snapshot: Snapshot, fresh: Freshness, series: RunSeries
) -> list[Row]:
    """A row for each of the `workers` of the snapshot."""
    return [
        Row(
            worker,
            inner_step_now(snapshot, worker, fresh),
            series.rate_of(worker.id),
            [speed for _, speed in series.speeds.get(worker.id, ())],
        )
        for worker in workers
    ]


def table(
    columns: Sequence[Column],
    rows: Sequence[Row],
    sheet: Sheet,
    *,
    names_first: int,
    emphasised: str = "",
) -> list[Text]:
    """The titles of the columns that have room, and a line for each row.

    `names_first`: columns of this rank and above give way before a name is cut. `emphasised` is the
    title of the column that the rows are sorted by.
    """
    cells = {column.title: [column.shown(row, sheet.glyphs) for row in rows] for column in columns}
    sizes = {column.title: column.natural(cells[column.title]) for column in columns}
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

    def line(shown: Sequence[Shown]) -> Text:
        made = Text()
        for column, (whole, style) in zip(kept, shown, strict=True):
            size = sizes[column.title]
            text = sheet.glyphs.clip(whole, size)
            pad = " " * (size - cell_len(text))
            made.append(" " if made.plain else "")
            made.append(text + pad if column.left else pad + text, style)
        made.truncate(sheet.width)  # a state or a health of absurd length
        made.rstrip()
        return made

    titles = [(c.title, "bold" if c.title == emphasised else QUIET) for c in kept]
    return [line(titles), *map(line, zip(*(cells[c.title] for c in kept), strict=True))]


def _inner(row: Row, _: Glyphs) -> Cell:
    """Inner steps since the last boundary, of H, which Dynamic Local Updates set for each worker."""
    worker = row.worker
    steps = worker.inner_step if row.inner is None else f"{MARK}{row.inner}"
    return None if row.lost else f"{steps}/{worker.sync_every}"


def _health(row: Row, glyphs: Glyphs) -> Cell:
    health = row.worker.health
    return notation.marked(health, notation.HEALTH_STYLES.get(health, UNEASY), glyphs)


def _speed(row: Row, _: Glyphs) -> Cell:
    pace = row.worker.steps_per_s
    return None if pace is None or row.lost else scaled(pace)


def _loss(row: Row, glyphs: Glyphs) -> Cell:
    worker = row.worker
    return notation.number(worker.loss, glyphs.none) if worker.loss_is_finite else ("nan", UNEASY)


def _norm(row: Row, glyphs: Glyphs) -> Cell:
    """How long its last push was; marked where that is many times what the others send."""
    worker = row.worker
    stands_out = worker.times_usual is not None and worker.times_usual > STANDS_OUT
    text = notation.number(worker.delta_norm, glyphs.none)
    return (text, UNEASY) if stands_out else text


def _synced(row: Row, _: Glyphs) -> Cell:
    age_s = row.worker.sync_age_s
    return None if age_s is None else duration(age_s)


def _name(row: Row, glyphs: Glyphs) -> Cell:
    """Further in below its relay."""
    return INDENT * row.worker.level + glyphs.printable(row.worker.title)


def _told(told: Callable[[Worker], str | Shown]) -> Callable[[Row, Glyphs], Cell]:
    """What relays do not tell of those behind them."""
    return lambda row, _: None if row.worker.level else told(row.worker)


NAME = Column("WORKER", _name, left=True, least=8)
HEALTH = Column("HEALTH", _health, left=True)
HOST = Column("HOST", lambda r, g: g.printable(r.worker.host), left=True)
STATE = Column("STATE", lambda r, g: None if r.lost else g.printable(r.worker.state), left=True)
ROUND = Column("ROUND", lambda r, _: None if r.worker.round is None else str(r.worker.round))
INNER = Column("INNER", _inner)
SPEED = Column("STEP/S", _speed, rank=1)
LOSS = Column("LOSS", _loss, rank=1)
BEAT = Column("BEAT", lambda r, _: duration(r.worker.beat_age_s))
STALE = Column("STALE", lambda r, _: str(r.worker.staleness), rank=2)
UP = Column("UP", _told(lambda w: byte_size(w.bytes_up)), rank=1)
DOWN = Column("DOWN", _told(lambda w: byte_size(w.bytes_down)), rank=1)
PUSHES = Column("PUSHES", lambda r, _: str(r.worker.pushes), rank=4)
REJECTED = Column("REJ", _told(lambda w: (str(w.rejected), UNEASY if w.rejected else "")), rank=3)
NORM = Column("NORM", _norm, rank=7)
TOKENS = Column("TOKENS", _told(lambda w: scaled(w.tokens)), rank=5)

ONE_SCREEN = (
    *(NAME, HEALTH, STATE, ROUND, INNER, SPEED, LOSS, BEAT, STALE, UP, DOWN, PUSHES, REJECTED),
    *(TOKENS, replace(HOST, rank=6), NORM),
)
FULL_SCREEN = (
    replace(NAME, most=32),
    replace(HEALTH, size=6),
    replace(HOST, least=6, most=24),
    replace(STATE, rank=1, size=8),
    replace(ROUND, size=5),
    replace(INNER, title="INNER/H", size=7),
    replace(SPEED, title="ST/S", rank=0, size=4),
    Column("SPEED", lambda r, g: (g.chart(r.speeds, SPARK)[0], QUIET), 4, left=True, size=SPARK),
    replace(LOSS, rank=0, size=5),
    replace(BEAT, size=4),
    Column("SYNC", _synced, rank=3, size=4),
    replace(STALE, title="OLD", rank=0, size=3),
    Column("TX/S", lambda r, _: byte_size(r.rate.up) if r.rate else None, size=6),
    Column("RX/S", lambda r, _: byte_size(r.rate.down) if r.rate else None, size=6),
    replace(UP, title="SENT", rank=6, size=6),
    replace(DOWN, title="GOT", rank=6, size=6),
    replace(PUSHES, rank=5),
    replace(REJECTED, rank=2),
    Column("STEP", lambda r, _: scaled(r.worker.step), rank=7, size=5),
    replace(NORM, rank=8),
    replace(TOKENS, rank=8),
)
