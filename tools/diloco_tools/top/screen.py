"""One screen of diloco-top: a snapshot as lines of styled text, never wider than asked.

Pure: the model, the time, the width and the signs come in, text goes out. Lines are built from
labelled rows whose parts flow onto a next line where they do not fit, and one table.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from diloco_tools.feed import FeedModel, Snapshot, Worker
from diloco_tools.top.notation import (
    BAD,
    LEVEL_STYLES,
    OK,
    QUIET,
    UNEASY,
    Glyphs,
    byte_size,
    duration,
    freshness_mark,
    health_mark,
    number,
    scaled,
)

MIN_WIDTH = 80  # everything is there at 80; a narrower terminal wraps lines, and loses nothing
LABEL = 10  # columns for the name of a row, its gap included
LAST_EVENTS = 5
NAMES = 4  # of missing workers in one row
REASONS = 6  # of a degraded run; the table has the rest


def screen(model: FeedModel, now: float, address: str, width: int, glyphs: Glyphs) -> Text:
    """The whole picture at `now` (seconds, the clock that `model` was updated with)."""
    width = max(width, MIN_WIDTH)
    snapshot = model.at(now)
    lines = [_header(model, now, address, width, glyphs)]
    lines += _verdict(model, now, width, glyphs)
    if snapshot is not None:
        lines += _rows(snapshot, width, glyphs)
        lines += [Text(), *_workers(snapshot, width, glyphs)]
        lines += [Text(), *_events(snapshot, width, glyphs)] if snapshot.events else []
    return Text("\n").join(lines)


def _header(model: FeedModel, now: float, address: str, width: int, glyphs: Glyphs) -> Text:
    mark, style = freshness_mark(model.freshness(now), glyphs)
    right = Text(f"{mark} {duration(model.age_s(now))}", style)
    words = []
    if model.snapshot is not None:
        run = model.snapshot.run
        words = [f"run {run[:8]}" if run else "no run yet", model.snapshot.mode]
    rest = glyphs.clip(glyphs.printable("  ".join(["", *words])), width // 2)
    room = width - len("diloco-top  ") - cell_len(rest) - right.cell_len - 2
    left = Text("diloco-top", "bold") + Text("  " + glyphs.clip(glyphs.printable(address), room))
    left.append(rest)
    left.append(" " * (width - left.cell_len - right.cell_len))
    return left.append_text(right)


def _verdict(model: FeedModel, now: float, width: int, glyphs: Glyphs) -> list[Text]:
    verdict = model.verdict(now)
    if verdict.healthy:
        return [Text(f"{glyphs.good} HEALTHY", OK)]
    shown = list(verdict.reasons[:REASONS])
    if len(verdict.reasons) > REASONS:
        shown.append(f"and {len(verdict.reasons) - REASONS} more")
    lines: list[Text] = []
    for reason in shown:
        label = "" if lines else f"{glyphs.uneasy} DEGRADED"
        words = [Text(word) for word in glyphs.printable(reason).split()]
        lines += _flow(Text(label, UNEASY), words, width, glyphs, indent=12, gap=1)
    return lines


def _rows(snapshot: Snapshot, width: int, glyphs: Glyphs) -> list[Text]:
    lines: list[Text] = []
    for label, parts in _facts(snapshot, glyphs):
        texts = [part if isinstance(part, Text) else Text(glyphs.printable(part)) for part in parts]
        shown = [text for text in texts if text.plain]
        if shown:
            lines += _flow(Text(label, QUIET), shown, width, glyphs)
    return lines


def _facts(snapshot: Snapshot, glyphs: Glyphs) -> Iterable[tuple[str, Sequence[str | Text]]]:
    """Rows as (label, parts); an empty part is left out, and a row with none."""
    counts, totals, loop, outer = snapshot.counts, snapshot.totals, snapshot.loop, snapshot.outer
    if snapshot.mode == "async":
        yield ("applied", _applied(snapshot))
    # Before the first round the feed has a round 0 in which nobody is expected.
    elif (now_open := snapshot.round) and (now_open.number or now_open.expected):
        arrived, expected = len(now_open.arrived), len(now_open.expected)
        yield (
            "round",
            (
                f"{now_open.number} {now_open.phase} {duration(now_open.age_s)}",
                f"fragment {now_open.fragment}" if len(snapshot.fragments) > 1 else "",
                Text(f"{arrived}/{expected} arrived {glyphs.bar(arrived, expected)}"),
                _names("missing", now_open.missing),
            ),
        )
    wanted = snapshot.workers_wanted
    yield (
        "workers",
        (
            f"{counts.alive} alive",
            f"{counts.participating} participating",
            f"{counts.averaged} averaged",
            f"{wanted} wanted" if wanted is not None else "",
            _count(totals.deaths, "died", BAD),
        ),
    )
    if last := snapshot.last_round:
        has_rounds = snapshot.mode != "async"
        yield (
            "last",
            (
                f"round {last.number}" if has_rounds else f"push {last.number + 1}",
                f"took {last.seconds:.1f} s" if has_rounds else "",
                f"{last.averaged} averaged"
                if has_rounds
                else f"{last.staleness} version{'s'[: last.staleness != 1]} old",
                f"loss {number(last.loss)}" if last.loss is not None else "",
                f"delta norm {last.delta_norm:.3g}" if last.delta_norm is not None else "",
            ),
        )
    yield (
        "outer",
        (
            f"{outer.optimizer} {outer.variant or ''}".strip(),
            f"lr {outer.lr:g}" if outer.lr is not None else "",
            f"momentum {outer.momentum:g}" if outer.momentum is not None else "",
            _buffers(snapshot),
            f"every {snapshot.sync_every} steps" if snapshot.sync_every else "",
            f"{snapshot.wire_dtype} up, {snapshot.reply_dtype} down" if snapshot.wire_dtype else "",
        ),
    )
    if parts := _reducing(snapshot):
        yield ("reducing", parts)
    if len(snapshot.fragments) > 1:
        yield (
            "fragments",
            (
                str(len(snapshot.fragments)),
                f"merged after {snapshot.fragment_sync_delay} steps",
                f"alpha {snapshot.fragment_update_alpha:g}"
                if snapshot.fragment_merge == "alpha"
                else snapshot.fragment_merge,
            ),
        )
    if size := snapshot.model:
        versions = " ".join(str(part.version) for part in snapshot.fragments)
        yield (
            "model",
            (
                f"{scaled(size.parameters)} parameters",
                f"{size.tensors} tensors",
                byte_size(size.bytes),
                f"version{'s' if len(snapshot.fragments) > 1 else ''} {versions}"
                if versions
                else "",
            ),
        )
    yield (
        "traffic",
        (
            f"{byte_size(totals.bytes_up)} up",
            f"{byte_size(totals.bytes_down)} down",
            f"{totals.pushes} pushes",
            _count(totals.rejected, "rejected", UNEASY),
            _count(totals.malformed, "malformed", UNEASY),
        ),
    )
    yield (
        "broker",
        (
            snapshot.state,
            f"up {duration(snapshot.uptime_s)}",
            f"{totals.rounds} rounds",
            f"turn {loop.longest_turn_ms:.1f} ms" if loop.longest_turn_ms is not None else "",
            f"cpu {duration(loop.cpu_s)}" if loop.cpu_s is not None else "",
            f"rss {byte_size(loop.rss_bytes)}" if loop.rss_bytes is not None else "",
        ),
    )


def _applied(snapshot: Snapshot) -> Sequence[str]:
    """What an asynchronous run has instead of a round."""
    count = sum(part.gradients for part in snapshot.fragments)
    reducer = snapshot.reducer
    return (
        f"{count} push{'es' if count != 1 else ''}",
        f"{reducer.submissions} under way" if reducer.submissions else "",
        f"{reducer.waiting} waiting for a slot" if reducer.waiting else "",
    )


def _buffers(snapshot: Snapshot) -> str:
    """How full the buffer of the outer optimizer is, fragment by fragment."""
    size = snapshot.outer.buffer
    if not size or size == 1:
        return ""
    return "buffer " + " ".join(f"{part.buffered}/{size}" for part in snapshot.fragments)


def _reducing(snapshot: Snapshot) -> Sequence[str]:
    """What differs from a plain mean of everyone's contribution."""
    reducer = snapshot.reducer
    parts = (
        f"quorum {reducer.quorum}, {reducer.grace_s:g} s grace, late work: {reducer.late}"
        if reducer.quorum is not None
        else "",
        reducer.aggregate if reducer.aggregate != "mean" else "",
        "deterministic" if reducer.deterministic else "",
        f"weights by {reducer.weight_by}" if reducer.weight_by != "equal" else "",
    )
    return parts if any(parts) else ()


def _count(value: int, what: str, style: str) -> Text:
    return Text(f"{value} {what}", style if value else "")


def _names(label: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return f"{label} {', '.join(sorted(names)[:NAMES])}{more}"


def _flow(
    label: Text,
    parts: Sequence[Text],
    width: int,
    glyphs: Glyphs,
    *,
    indent: int = LABEL,
    gap: int = 2,
) -> list[Text]:
    """`label`, then `parts` one after another, on as many lines as they need."""
    lines = [label.copy()]
    lines[0].append(" " * (indent - label.cell_len))
    for part in parts:
        if part.cell_len > width - indent:
            part = Text(glyphs.clip(part.plain, width - indent), part.style)  # noqa: PLW2901
        start = lines[-1].cell_len == indent
        if not start and lines[-1].cell_len + gap + part.cell_len > width:
            lines.append(Text(" " * indent))
            start = True
        lines[-1].append(" " * (0 if start else gap)).append_text(part)
    return lines


@dataclass(frozen=True)
class Column:
    """A column of the worker table. `rank` 0 always stays; the highest rank goes first."""

    title: str
    cell: Callable[[Worker, Glyphs], tuple[str, str]]  # text and style
    rank: int = 0
    left: bool = False


def _plain(text: str) -> tuple[str, str]:
    return text, ""


def _state(worker: Worker, glyphs: Glyphs) -> tuple[str, str]:
    """What it does; of a lost worker nobody knows, here and in the next two."""
    return glyphs.none if worker.health == "lost" else glyphs.printable(worker.state), ""


def _inner(worker: Worker, glyphs: Glyphs) -> tuple[str, str]:
    if worker.health == "lost":
        return glyphs.none, ""
    return f"{worker.inner_step}/{worker.sync_every}", ""


def _speed(worker: Worker, glyphs: Glyphs) -> tuple[str, str]:
    known = worker.steps_per_s is not None and worker.health != "lost"
    return scaled(worker.steps_per_s or 0.0) if known else glyphs.none, ""


COLUMNS = (
    Column("WORKER", lambda w, g: _plain(g.printable(w.id)), left=True),
    Column("HEALTH", lambda w, g: health_mark(w.health, g), left=True),
    Column("STATE", _state, left=True),
    Column("ROUND", lambda w, g: _plain(g.none if w.round is None else str(w.round))),
    Column("INNER", _inner),
    Column("STEP/S", _speed, rank=1),
    Column("LOSS", lambda w, g: _plain(number(w.loss, g.none)), rank=1),
    Column("BEAT", lambda w, g: _plain(duration(w.beat_age_s))),
    Column("STALE", lambda w, g: _plain(str(w.staleness)), rank=2),
    Column("UP", lambda w, g: _plain(byte_size(w.bytes_up)), rank=1),
    Column("DOWN", lambda w, g: _plain(byte_size(w.bytes_down)), rank=1),
    Column("PUSHES", lambda w, g: _plain(str(w.pushes)), rank=4),
    Column("REJ", lambda w, g: (str(w.rejected), UNEASY if w.rejected else ""), rank=3),
    Column("TOKENS", lambda w, g: _plain(scaled(w.tokens)), rank=5),
    Column("HOST", lambda w, g: _plain(g.printable(w.host)), rank=6, left=True),
)
EXTRA_RANK = 3  # columns of this rank and above give way before a worker's name is cut
MIN_NAME = 8  # columns of a worker's name, below which other columns give way


def _workers(snapshot: Snapshot, width: int, glyphs: Glyphs) -> list[Text]:
    if not snapshot.workers:
        return [Text("no workers yet", QUIET)]
    workers = sorted(snapshot.workers, key=lambda worker: worker.id)
    table = [(column, [column.cell(worker, glyphs) for worker in workers]) for column in COLUMNS]
    sizes = {
        column.title: max(cell_len(text) for text in (column.title, *(c[0] for c in cells)))
        for column, cells in table
    }

    def excess(name: int) -> int:
        kept = (sizes[column.title] for column, _ in table[1:])
        return name + sum(kept) + len(table) - 1 - width

    natural = sizes["WORKER"]
    smallest = min(natural, MIN_NAME)
    while (worst := max(column.rank for column, _ in table)) and (
        excess(natural if worst >= EXTRA_RANK else smallest) > 0
    ):
        last = max(i for i, (column, _) in enumerate(table) if column.rank == worst)
        del table[last]
    sizes["WORKER"] = max(smallest, natural - max(0, excess(natural)))

    lines = [_line([(c.title, QUIET) for c, _ in table], table, sizes, width, glyphs)]
    for row in range(len(workers)):
        lines.append(_line([cells[row] for _, cells in table], table, sizes, width, glyphs))
    return lines


def _line(
    cells: Sequence[tuple[str, str]],
    table: Sequence[tuple[Column, object]],
    sizes: dict[str, int],
    width: int,
    glyphs: Glyphs,
) -> Text:
    line = Text()
    for (column, _), (text, style) in zip(table, cells, strict=True):
        size = sizes[column.title]
        shown = glyphs.clip(text, size)
        pad = " " * (size - cell_len(shown))
        line.append(" " if line.plain else "")
        line.append(shown + pad if column.left else pad + shown, style)
    line.truncate(width)  # a state or a health of absurd length
    line.rstrip()
    return line


def _events(snapshot: Snapshot, width: int, glyphs: Glyphs) -> list[Text]:
    lines: list[Text] = []
    for event in sorted(snapshot.events, key=lambda event: event.sequence)[-LAST_EVENTS:]:
        style = LEVEL_STYLES.get(event.level, "")
        words = [Text(word, style) for word in glyphs.printable(event.text).split()]
        if event.level != "info":
            words.insert(0, Text(glyphs.printable(event.level) + ":", style))
        label = Text(f"{duration(event.age_s):>5} ago", QUIET)
        lines += _flow(label, words, width, glyphs, gap=1)
    return lines
