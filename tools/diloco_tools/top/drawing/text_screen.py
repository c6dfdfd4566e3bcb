"""One screen of diloco-top as text: a snapshot as lines, never wider than asked.

Pure: the scene, the width and the signs come in, text goes out. Lines are built from labelled rows whose
parts flow onto a next line where they do not fit, and one table.
"""

from rich.text import Text

from diloco_protocol.feed import Snapshot
from diloco_protocol.monitor import tree
from diloco_tools.top.drawing import facts, panes
from diloco_tools.top.drawing.notation import QUIET, Glyphs, duration
from diloco_tools.top.drawing.scene import Scene
from diloco_tools.top.drawing.sheet import Sheet
from diloco_tools.top.drawing.table import ONE_SCREEN, rows_of, table

MIN_WIDTH = 80  # everything is there at 80; a narrower terminal wraps lines, and loses nothing
LAST_EVENTS = 5
LAST_REJECTIONS = 3
REASONS = 6  # of a degraded run; the table has the rest
NAMES_FIRST = 3  # columns of this rank and above give way before a worker's name is cut


def screen(scene: Scene, width: int, glyphs: Glyphs) -> Text:
    """The whole picture."""
    sheet = Sheet(max(width, MIN_WIDTH), glyphs)
    snapshot = scene.snapshot()
    words = [facts.run_title(snapshot), snapshot.mode] if snapshot is not None else []
    right = panes.insecure(scene) + panes.freshness(scene, sheet)
    header = panes.title(scene.address, words, right, sheet)
    header.stylize("bold")
    lines = [header, *_verdict(scene, sheet)]
    if snapshot is None:
        return Text("\n").join(lines)
    lines += [*_facts(snapshot, sheet), Text()]
    if snapshot.listed:
        workers = tree.arranged(snapshot.listed, lambda worker: worker.id)
        rows = rows_of(workers, snapshot, scene.fresh, scene.series)
        lines += table(ONE_SCREEN, rows, sheet, names_first=NAMES_FIRST)
    else:
        lines.append(Text(facts.nobody(snapshot), QUIET))
    refused = facts.newest_rejections(snapshot, LAST_REJECTIONS)
    lines += [Text()] * bool(refused)
    for each in refused:
        lines += panes.aged(each.age_s, facts.rejection(each, glyphs), sheet)
    lines += [Text()] * bool(snapshot.events)
    for event in sorted(snapshot.events, key=lambda event: event.sequence)[-LAST_EVENTS:]:
        lines += panes.happened(event, sheet)
    return Text("\n").join(lines)


def _verdict(scene: Scene, sheet: Sheet) -> list[Text]:
    mark, reasons = panes.verdict(scene, sheet)
    if not reasons:
        return [mark]
    more = f"and {len(reasons) - REASONS} more"
    lines: list[Text] = []
    for reason in (*reasons[:REASONS], *([more] if len(reasons) > REASONS else [])):
        label = Text() if lines else mark
        lines += sheet.flow(label, sheet.words(reason), indent=len(mark) + 2, gap=1)
    return lines


def _facts(snapshot: Snapshot, sheet: Sheet) -> list[Text]:
    """A row for each label that has something to say."""
    glyphs, merging = sheet.glyphs, facts.merging(snapshot)
    uptime, rounds = f"up {duration(snapshot.uptime_s)}", f"{snapshot.totals.rounds} rounds"
    outer = (*facts.optimizer(snapshot), facts.buffers(snapshot), *facts.exchange(snapshot))
    rows = (
        facts.now(snapshot, glyphs),
        ("workers", facts.counts(snapshot)),
        ("missing", facts.sites_away(snapshot, glyphs)),
        ("parent", facts.parent(snapshot, glyphs)),
        ("last", facts.last(snapshot)),
        ("ends", facts.end(snapshot)),
        ("asked", facts.asked(snapshot)),
        ("data", facts.data(snapshot, glyphs)),
        ("outer", outer),
        ("reducing", facts.reducing(snapshot)),
        ("fragments", (str(len(snapshot.fragments)), *merging) if merging else ()),
        ("async", facts.asynchronous(snapshot)),
        ("limits", facts.liveness(snapshot)),
        ("model", facts.model(snapshot)),
        ("traffic", facts.traffic(snapshot)),
        ("refused", (facts.reasons(snapshot),)),
        ("disk", facts.checkpoint(snapshot, glyphs)),
        ("broker", (facts.state(snapshot, glyphs), uptime, rounds, *facts.loop(snapshot))),
    )
    return [line for label, parts in rows if any(parts) for line in sheet.rows(label, parts)]
