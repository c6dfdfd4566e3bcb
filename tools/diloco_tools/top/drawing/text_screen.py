"""One screen of diloco-top: a snapshot as lines of styled text, never wider than asked.

Pure: the model, the time, the width and the signs come in, text goes out. Lines are built from
labelled rows whose parts flow onto a next line where they do not fit, and one table.
"""

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.text import Text

from diloco_protocol.feed import Snapshot
from diloco_tools.feed.estimate import inner_step_now
from diloco_tools.feed.model import FeedModel, Freshness
from diloco_tools.top.drawing import facts
from diloco_tools.top.drawing.lines import flow
from diloco_tools.top.drawing.notation import (
    LEVEL_STYLES,
    QUIET,
    Glyphs,
    duration,
    freshness_mark,
    verdict_mark,
)
from diloco_tools.top.drawing.table import ONE_SCREEN, Row, lay_out

MIN_WIDTH = 80  # everything is there at 80; a narrower terminal wraps lines, and loses nothing
LAST_EVENTS = 5
LAST_REJECTIONS = 3
REASONS = 6  # of a degraded run; the table has the rest
NAMES_FIRST = 3  # columns of this rank and above give way before a worker's name is cut


def screen(model: FeedModel, now: float, address: str, width: int, glyphs: Glyphs) -> Text:
    """The whole picture at `now` (seconds, the clock that `model` was updated with)."""
    width = max(width, MIN_WIDTH)
    snapshot = model.at(now)
    lines = [_header(model, now, address, width, glyphs)]
    lines += _verdict(model, now, width, glyphs)
    if snapshot is not None:
        lines += _rows(snapshot, width, glyphs)
        lines += [Text(), *_workers(snapshot, model.freshness(now), width, glyphs)]
        if snapshot.rejections:
            lines += [Text(), *_rejections(snapshot, width, glyphs)]
        if snapshot.events:
            lines += [Text(), *_events(snapshot, width, glyphs)]
    return Text("\n").join(lines)


def _header(model: FeedModel, now: float, address: str, width: int, glyphs: Glyphs) -> Text:
    mark, style = freshness_mark(model.freshness(now), glyphs)
    right = Text(f"{mark} {duration(model.age_s(now))}", style)
    words = []
    if model.snapshot is not None:
        name = facts.run_name(model.snapshot)
        words = [f"run {name}" if name else "no run yet", model.snapshot.mode]
    rest = glyphs.clip(glyphs.printable("  ".join(["", *words])), width // 2)
    room = width - len("diloco-top  ") - cell_len(rest) - right.cell_len - 2
    left = Text("diloco-top", "bold") + Text("  " + glyphs.clip(glyphs.printable(address), room))
    left.append(rest)
    left.append(" " * (width - left.cell_len - right.cell_len))
    return left.append_text(right)


def _verdict(model: FeedModel, now: float, width: int, glyphs: Glyphs) -> list[Text]:
    verdict = model.verdict(now)
    mark, style = verdict_mark(verdict.word, glyphs)
    if not verdict.reasons:
        return [Text(mark, style)]
    shown = list(verdict.reasons[:REASONS])
    if len(verdict.reasons) > REASONS:
        shown.append(f"and {len(verdict.reasons) - REASONS} more")
    lines: list[Text] = []
    for reason in shown:
        label = Text("" if lines else mark, style)
        words = [Text(word) for word in glyphs.printable(reason).split()]
        lines += flow(label, words, width, glyphs, indent=len(mark) + 2, gap=1)
    return lines


def _rows(snapshot: Snapshot, width: int, glyphs: Glyphs) -> list[Text]:
    lines: list[Text] = []
    for label, parts in _facts(snapshot, glyphs):
        if shown := facts.texts(parts, glyphs):
            lines += flow(Text(label, QUIET), shown, width, glyphs)
    return lines


def _facts(snapshot: Snapshot, glyphs: Glyphs) -> Iterable[tuple[str, Sequence[facts.Part]]]:
    """Rows as (label, parts); an empty part is left out, and a row with none."""
    if snapshot.mode == "async":
        yield ("applied", facts.applied_parts(snapshot))
    else:
        yield ("round", facts.round_parts(snapshot, glyphs))
    yield ("workers", facts.counts_parts(snapshot))
    yield ("last", facts.last_parts(snapshot))
    yield (
        "outer",
        (
            *facts.optimizer_parts(snapshot),
            facts.buffers_part(snapshot),
            *facts.terms_parts(snapshot),
        ),
    )
    yield ("reducing", facts.reducing_parts(snapshot))
    if merging := facts.merging_parts(snapshot):
        yield ("fragments", (str(len(snapshot.fragments)), *merging))
    yield ("async", facts.asynchronous_parts(snapshot))
    yield ("limits", facts.liveness_parts(snapshot))
    yield ("model", facts.model_parts(snapshot))
    yield ("traffic", facts.traffic_parts(snapshot))
    yield ("refused", (facts.reasons(snapshot),))
    yield ("disk", facts.checkpoint_parts(snapshot, glyphs))
    yield (
        "broker",
        (
            facts.state_part(snapshot, glyphs),
            f"up {duration(snapshot.uptime_s)}",
            f"{snapshot.totals.rounds} rounds",
            *facts.loop_parts(snapshot),
        ),
    )


def _workers(snapshot: Snapshot, fresh: Freshness, width: int, glyphs: Glyphs) -> list[Text]:
    if not snapshot.workers:
        return [Text(facts.nobody(snapshot), QUIET)]
    rows = [
        Row(worker, inner_step_now(snapshot, worker, fresh))
        for worker in sorted(snapshot.workers, key=lambda worker: worker.id)
    ]
    table = lay_out(ONE_SCREEN, rows, width, glyphs, names_first=NAMES_FIRST)
    return [table.header, *table.lines]


def _rejections(snapshot: Snapshot, width: int, glyphs: Glyphs) -> list[Text]:
    lines: list[Text] = []
    for refused in facts.newest_rejections(snapshot, LAST_REJECTIONS):
        words = [Text(word) for word in facts.rejection(refused, glyphs).split()]
        label = Text(f"{duration(refused.age_s):>5} ago", QUIET)
        lines += flow(label, words, width, glyphs, gap=1)
    return lines


def _events(snapshot: Snapshot, width: int, glyphs: Glyphs) -> list[Text]:
    lines: list[Text] = []
    for event in sorted(snapshot.events, key=lambda event: event.sequence)[-LAST_EVENTS:]:
        style = LEVEL_STYLES.get(event.level, "")
        words = [Text(word, style) for word in glyphs.printable(event.text).split()]
        if event.level != "info":
            words.insert(0, Text(glyphs.printable(event.level) + ":", style))
        label = Text(f"{duration(event.age_s):>5} ago", QUIET)
        lines += flow(label, words, width, glyphs, gap=1)
    return lines
