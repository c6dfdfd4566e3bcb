"""One screen of diloco-top: a snapshot as lines of styled text, never wider than asked.

Pure: the model, the time, the width and the signs come in, text goes out. Lines are built from
labelled rows whose parts flow onto a next line where they do not fit, and one table.
"""

from collections.abc import Iterable, Sequence

from rich.text import Text

from diloco_protocol.feed import Snapshot
from diloco_tools.feed.estimate import inner_step_now
from diloco_tools.feed.model import FeedModel, Freshness
from diloco_tools.top.drawing import facts
from diloco_tools.top.drawing.notation import (
    LEVEL_STYLES,
    QUIET,
    Glyphs,
    duration,
    freshness_mark,
    verdict_mark,
)
from diloco_tools.top.drawing.panes import aged, event_text, title
from diloco_tools.top.drawing.sheet import Part, Sheet
from diloco_tools.top.drawing.table import ONE_SCREEN, Row, lay_out

MIN_WIDTH = 80  # everything is there at 80; a narrower terminal wraps lines, and loses nothing
LAST_EVENTS = 5
LAST_REJECTIONS = 3
REASONS = 6  # of a degraded run; the table has the rest
NAMES_FIRST = 3  # columns of this rank and above give way before a worker's name is cut


def screen(model: FeedModel, now: float, address: str, width: int, glyphs: Glyphs) -> Text:
    """The whole picture at `now` (seconds, the clock that `model` was updated with)."""
    sheet = Sheet(max(width, MIN_WIDTH), glyphs)
    snapshot, fresh = model.at(now), model.freshness(now)
    mark, style = freshness_mark(fresh, glyphs)
    words = [facts.run_title(snapshot), snapshot.mode] if snapshot is not None else []
    age = Text(f"{mark} {duration(model.age_s(now))}", style)
    header = title(address, words, age, sheet)
    header.stylize("bold")
    lines = [header, *_verdict(model, now, sheet)]
    if snapshot is not None:
        for label, parts in _facts(snapshot, glyphs):
            if shown := sheet.texts(parts):
                lines += sheet.rows(label, shown)
        lines += [Text(), *_workers(snapshot, fresh, sheet)]
        if refused := facts.newest_rejections(snapshot, LAST_REJECTIONS):
            lines.append(Text())
            for each in refused:
                lines += aged(each.age_s, facts.rejection(each, glyphs), sheet)
        if snapshot.events:
            lines.append(Text())
            for event in sorted(snapshot.events, key=lambda event: event.sequence)[-LAST_EVENTS:]:
                style = LEVEL_STYLES.get(event.level, "")
                lines += aged(event.age_s, event_text(event), sheet, style)
    return Text("\n").join(lines)


def _verdict(model: FeedModel, now: float, sheet: Sheet) -> list[Text]:
    verdict = model.verdict(now)
    mark, style = verdict_mark(verdict.word, sheet.glyphs)
    if not verdict.reasons:
        return [Text(mark, style)]
    shown = list(verdict.reasons[:REASONS])
    if len(verdict.reasons) > REASONS:
        shown.append(f"and {len(verdict.reasons) - REASONS} more")
    lines: list[Text] = []
    for reason in shown:
        label = Text("" if lines else mark, style)
        lines += sheet.flow(label, sheet.words(reason), indent=len(mark) + 2, gap=1)
    return lines


def _facts(snapshot: Snapshot, glyphs: Glyphs) -> Iterable[tuple[str, Sequence[Part]]]:
    """Rows as (label, parts); an empty part is left out, and a row with none."""
    merging = facts.merging_parts(snapshot)
    return (
        facts.now_row(snapshot, glyphs),
        ("workers", facts.counts_parts(snapshot)),
        ("last", facts.last_parts(snapshot)),
        (
            "outer",
            (
                *facts.optimizer_parts(snapshot),
                facts.buffers_part(snapshot),
                *facts.terms_parts(snapshot),
            ),
        ),
        ("reducing", facts.reducing_parts(snapshot)),
        ("fragments", (str(len(snapshot.fragments)), *merging) if merging else ()),
        ("async", facts.asynchronous_parts(snapshot)),
        ("limits", facts.liveness_parts(snapshot)),
        ("model", facts.model_parts(snapshot)),
        ("traffic", facts.traffic_parts(snapshot)),
        ("refused", (facts.reasons(snapshot),)),
        ("disk", facts.checkpoint_parts(snapshot, glyphs)),
        (
            "broker",
            (
                facts.state_part(snapshot, glyphs),
                f"up {duration(snapshot.uptime_s)}",
                f"{snapshot.totals.rounds} rounds",
                *facts.loop_parts(snapshot),
            ),
        ),
    )


def _workers(snapshot: Snapshot, fresh: Freshness, sheet: Sheet) -> list[Text]:
    if not snapshot.workers:
        return [Text(facts.nobody(snapshot), QUIET)]
    rows = [
        Row(worker, inner_step_now(snapshot, worker, fresh))
        for worker in sorted(snapshot.workers, key=lambda worker: worker.id)
    ]
    table = lay_out(ONE_SCREEN, rows, sheet, names_first=NAMES_FIRST)
    return [table.header, *table.lines]
