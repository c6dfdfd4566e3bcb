"""The whole of the full screen as lines of styled text: as many as the window has. Pure.

The height decides: rows that must be there, then workers, then events; from 32 lines on there is air
between them, and curves take several lines.
"""

from dataclasses import dataclass, replace

from rich.text import Text

from diloco_protocol.feed import Snapshot, Worker
from diloco_protocol.monitor import tree
from diloco_tools.top.drawing import facts, panes
from diloco_tools.top.drawing.keys import footer, keys_for
from diloco_tools.top.drawing.notation import QUIET, UNEASY, Glyphs
from diloco_tools.top.drawing.scene import Said, Scene, View
from diloco_tools.top.drawing.sheet import Sheet
from diloco_tools.top.drawing.table import FULL_SCREEN, rows_of, table

MIN_WIDTH, MIN_HEIGHT = 80, 24  # everything is there at 80 by 24
TALL = 32  # lines from which there is room for air
CURVE = 4  # lines of a curve on a tall screen
EVENTS, EVENTS_TALL = 4, 8  # lines kept for events when there are many workers
LONG_EVENT = 3  # lines that one event may have
MARKED = "bold on #2b3648"
SILENCE = (
    "No snapshot has come from {} yet. Start diloco-broker serve, or give the feed address that it "
    "printed (the control address has another port). This screen fills as soon as the broker is there."
)


@dataclass(frozen=True)
class Picture:
    """Lines from top to bottom; workers `first` and on stand in `shown` lines from line `top` on."""

    lines: list[Text]
    rows: list[Worker]
    top: int = 0
    first: int = 0
    shown: int = 0

    def worker_at(self, line: int) -> str | None:
        """The id of the worker in that line of the screen."""
        place = line - self.top
        return self.rows[self.first + place].id if 0 <= place < self.shown else None


def picture(scene: Scene, view: View, width: int, height: int, glyphs: Glyphs) -> Picture:
    """What the window shows. Settles the marked worker and the scroll of `view`."""
    wide = max(width, MIN_WIDTH)
    sheet = Sheet(wide - 2, glyphs)  # a column of air at either side
    snapshot = scene.snapshot()
    paused = snapshot is not None and snapshot.state == "paused"
    keys = keys_for(readonly=scene.readonly, replay=scene.replay is not None)
    foot = footer(keys, wide, glyphs, paused=paused, frozen=scene.frozen_s is not None)
    head = panes.header(scene, sheet)
    if snapshot is None:
        words = sheet.words(scene.model.refusal or SILENCE.format(scene.address))
        body = _inset(sheet.flow(Text(), words, indent=0, gap=1))
        status = _status(scene, "", sheet)
        gap = max(0, height - len(body) - 3 - len(status))
        return Picture([head, Text(), *body, *[Text()] * gap, *status, foot], [])

    tall = height >= TALL
    air = [Text()] * tall
    if width < MIN_WIDTH or height < MIN_HEIGHT - 1:  # the filter may have the last line
        said = f"{width}x{height} is too small: diloco-top needs 80x24"
        scene = replace(scene, said=Said(said, UNEASY))
    rows = view.rows(snapshot.listed)
    # Without header, the table's head, what is said, the footer, and the air before the events.
    inner = height - 1 - 1 - len(_status(scene, "", sheet)) - 1 - len(air)
    # Long rows, limits and long events only where everybody has room as well.
    for wordy, limits, longest in (
        (True, True, LONG_EVENT),
        (True, True, 1),
        (True, False, 1),
        (False, False, 1),
    ):
        upper = _upper(scene, snapshot, sheet, tall=tall, wordy=wordy, limits=limits)
        free = inner - len(upper)  # lines for workers and events
        log = panes.events(snapshot, sheet, free + 1, longest)
        if tall or len(rows) + len(log) <= free:
            break
    room = max(1, free - min(len(log), EVENTS_TALL if tall else EVENTS))
    place = view.settle(rows, room)
    known = rows_of(rows, snapshot, scene.model.freshness(scene.now), scene.series)
    titles, *drawn = table(FULL_SCREEN, known, sheet, names_first=1, emphasised=view.by.column)
    seen = drawn[view.offset : view.offset + room]
    window = seen or [_nobody(snapshot, view, sheet)]
    if place >= 0:
        marked = window[place - view.offset]
        marked.append(" " * (sheet.width - marked.cell_len))
        marked.stylize(MARKED)
    left = max(0, free - len(window))
    log = log[-left:] if left else []
    log += [Text()] * (left - len(log))
    lines = [
        *_inset([*upper, titles]),
        *(
            Text.assemble((">", "bold") if view.offset + n == place else " ", line)
            for n, line in enumerate(window)
        ),
        *_inset([*air, *log]),
    ]
    status = _status(scene, _counted(snapshot, view, rows, room), sheet)
    kept = max(0, height - 2 - len(status))
    return Picture(
        [head, *lines[:kept], *status, foot][:height],
        rows,
        top=1 + len(upper) + 1,
        first=view.offset,
        shown=len(seen),
    )


def _inset(lines: list[Text]) -> list[Text]:
    return [Text(" ") + line for line in lines]


def _upper(
    scene: Scene, snapshot: Snapshot, sheet: Sheet, *, tall: bool, wordy: bool, limits: bool
) -> list[Text]:
    """What stands between the header and the table."""
    rows, refusals, reasons = (2, 3, 3) if tall else (2, 1, 2) if wordy else (1, 0, 1)
    air = [Text()] * tall
    return [
        *air,
        *panes.run_rows(snapshot, sheet, rows, limits=limits),
        *air,
        *panes.curves(scene, snapshot, sheet, CURVE if tall else 1),
        *air,
        *panes.broker_rows(snapshot, scene.series.cpu, sheet, refusals),
        *_verdict(scene, sheet, reasons),
        *air,
    ]


def _verdict(scene: Scene, sheet: Sheet, most: int) -> list[Text]:
    """The verdict and its reasons: on one line if there is but one, else a line for each."""
    label, reasons = panes.verdict(scene, sheet)
    if not reasons:
        return [label]
    label.append("  ")
    shown = [sheet.text(reason) for reason in reasons]
    if most == 1:
        return [sheet.cut(Text.assemble(label, Text("; ").join(shown)))]
    if len(reasons) > most:
        shown[most - 1 :] = [Text(f"and {len(reasons) - most + 1} more")]
    indent = Text(" " * label.cell_len)
    return [sheet.cut(Text.assemble(indent if i else label, text)) for i, text in enumerate(shown)]


def _nobody(snapshot: Snapshot, view: View, sheet: Sheet) -> Text:
    if not snapshot.listed:
        return Text(facts.nobody(snapshot), QUIET)
    return sheet.text(f"no worker has {view.wanted!r} in it", QUIET)


def _counted(snapshot: Snapshot, view: View, rows: list[Worker], room: int) -> str:
    """How many of the workers are in sight, and in which order."""
    words = []
    if view.wanted:
        whole = len(tree.everyone(snapshot.listed))
        words.append(f"{len(rows)} of {whole} workers have {view.wanted!r}")
    if len(rows) > room:
        words.append(f"{view.offset + 1}-{view.offset + room} of {len(rows)}")
    if len(rows) > 1:
        words.append(f"by {view.by.name}" + (" turned round" if view.reverse else ""))
    return ", ".join(words)


def _status(scene: Scene, counted: str, sheet: Sheet) -> list[Text]:
    """What was said last, whole; behind it, where there is room, what the table shows."""
    shown = sheet.text(counted, QUIET)
    words = sheet.words(scene.said.text, scene.said.style)
    lines = sheet.flow(Text(), words, indent=0, gap=1)
    # What was said comes first: how the table is sorted can wait.
    if lines[-1].cell_len + shown.cell_len + 2 <= sheet.width or not words:
        lines[-1] = sheet.apart(lines[-1], shown)
    return _inset(lines)
