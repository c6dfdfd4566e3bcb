"""The parts of the screens: header, facts, curves, verdict, events. Pure.

Each gives lines no wider than its sheet; `text_screen` and `full_screen` put them together.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from diloco_protocol.feed import INSECURE, Event, LastRound, Snapshot
from diloco_tools.monitor.feed.model import Freshness
from diloco_tools.monitor.feed.series import recent_scale
from diloco_tools.top.drawing import facts, notation
from diloco_tools.top.drawing.notation import BAD, OK, QUIET, UNEASY, duration
from diloco_tools.top.drawing.scene import Scene
from diloco_tools.top.drawing.sheet import LABEL, Part, Sheet, beside

# The whole line turns: nobody should read old figures as new ones.
HEADER_STYLES = {Freshness.LATE: f"bold reverse {UNEASY}", Freshness.STALE: f"bold reverse {BAD}"}
NAMED_REPLAY = 98  # columns from which the header of a replay has room for our name
WORDY = 120  # columns above which rows say more
FOUR_CURVES = 110  # columns from which there is room for the norm of the deltas


def title(address: str, words: Sequence[str], right: Text, sheet: Sheet) -> Text:
    """Our name, the address and `words` about the run; `right` at the other end."""
    left = Text("diloco-top  ")
    rest = _clipped(["", *words], sheet)
    room = sheet.width - left.cell_len - cell_len(rest) - right.cell_len - 2
    left.append(sheet.glyphs.clip(sheet.glyphs.printable(address), max(8, room)))
    return sheet.apart(left.append(rest), right)


def _clipped(words: Sequence[str], sheet: Sheet) -> str:
    return sheet.glyphs.clip(sheet.glyphs.printable("  ".join(words)), sheet.width // 2)


def header(scene: Scene, sheet: Sheet) -> Text:
    """Whose run this is, and how much to believe of it."""
    snapshot = scene.model.snapshot
    words = []
    if snapshot is not None:
        size = [notation.scaled(snapshot.model.parameters)] if snapshot.model is not None else []
        words = [facts.run_title(snapshot), *size, snapshot.mode]
    right = _feed(scene, sheet)
    # The time of a replay needs the room, and whoever gave a history knows what shows it.
    if scene.replay is not None and sheet.width < NAMED_REPLAY:
        return Text(" ") + sheet.apart(Text(_clipped(words, sheet)), right)
    line = Text(" ") + title(scene.address, words, right, sheet) + Text(" ")
    line.stylize("bold", 1, 1 + len("diloco-top"))
    if scene.replay is None and (turned := HEADER_STYLES.get(scene.fresh)):
        line = Text(line.plain)
        line.stylize(turned)  # as a span: Text leaves the style of its own to whoever prints it
    return line


def _feed(scene: Scene, sheet: Sheet) -> Text:
    """Where a replay is, or what is known of the feed."""
    if (replay := scene.replay) is not None:
        pace = f"{sheet.glyphs.play} x{replay.speed}" if replay.playing else "stopped"
        place = f"{replay.index + 1}/{len(replay.moments)} {pace}"
        return Text(f"REPLAY {replay.time_of_day}  {place}", UNEASY)
    text = Text()
    text.append_text(insecure(scene))
    if scene.readonly:
        text.append("readonly  ", QUIET)
    if scene.frozen_s is not None:
        text.append(f"FROZEN {duration(scene.frozen_s)}  ", UNEASY)
    if scene.model.restarts:
        text.append(facts.plural(scene.model.restarts, "restart") + "  ", UNEASY)
    if scene.model.missed:
        text.append(f"{scene.model.missed} missed  ", UNEASY)
    age = freshness(scene, sheet)
    age.stylize("bold")
    return text.append_text(age)


def insecure(scene: Scene) -> Text:
    """A word where anybody may steer the run; it is never left out for want of room."""
    snapshot = scene.model.snapshot
    is_open = snapshot is not None and snapshot.security == INSECURE
    return Text(f"{INSECURE}  " if is_open else "", f"bold {BAD}")


def freshness(scene: Scene, sheet: Sheet) -> Text:
    """How old the feed is: its sign, its word, its age."""
    style = notation.FRESHNESS_STYLES[scene.fresh]
    mark, _ = notation.marked(scene.fresh.name, style, sheet.glyphs)
    return Text().append(f"{mark} {duration(scene.age_s)}", style)


def run_rows(snapshot: Snapshot, sheet: Sheet, most: int, *, limits: bool) -> list[Text]:
    """Round, workers, optimizer, fragments, and with `limits` what the run was told beside them; no row
    has more than `most` lines.
    """
    wordy = sheet.width > WORDY
    state = Text()
    if snapshot.state != "training":
        state = facts.state(snapshot, sheet.glyphs)
    room = sheet.width - state.cell_len - 2 * bool(state.plain)
    now = Sheet(room, sheet.glyphs).row(*facts.now(snapshot, sheet.glyphs))
    last = facts.last(snapshot)
    counts = (*facts.counts(snapshot), *(("last:", *last) if last and wordy else ()))
    outer = (*facts.optimizer(snapshot), *facts.exchange(snapshot))
    outer += (*facts.merging(snapshot), *facts.reducing(snapshot))
    told = (*facts.asynchronous(snapshot), *facts.liveness(snapshot))
    lines = [sheet.apart(now, state), sheet.row("workers", counts)]
    for label, more in (
        ("missing", facts.sites_away(snapshot, sheet.glyphs)),
        ("parent", facts.parent(snapshot, sheet.glyphs)),
        ("ends", facts.end(snapshot)),
        ("asked", facts.asked(snapshot)),
        ("data", facts.data(snapshot, sheet.glyphs)),
    ):
        if any(more):
            lines += sheet.rows(label, more, most)
    lines += sheet.rows("outer", outer, most)
    if limits and any(told):
        lines += sheet.rows("limits", told, most)
    if parts := [facts.fragment(f, snapshot, wordy=wordy) for f in snapshot.fragments]:
        label = "fragments" if len(parts) > 1 else "fragment"
        lines += sheet.rows(label, parts, max(2, most))
    return lines


def broker_rows(snapshot: Snapshot, cpu: float | None, sheet: Sheet, most: int) -> list[Text]:
    """What the broker takes, its newest checkpoint, and what it refused.

    The last `most` refusals have a line each, the newest first; with 0 the last one has what is left
    of the line with the counts.
    """
    saved = facts.checkpoint(snapshot, sheet.glyphs)
    used = (f"up {duration(snapshot.uptime_s)}", *facts.loop(snapshot, cpu), *saved)
    totals = snapshot.totals
    why = sheet.glyphs.printable(facts.reasons(snapshot))
    counts = facts.count(totals.rejected, "rejected", UNEASY)
    parts: list[Part] = [Text.assemble(counts, f": {why}" if why else "")]
    if totals.malformed:
        parts.append(facts.count(totals.malformed, "malformed", UNEASY))
    last = [
        Text.assemble((f"{duration(each.age_s)} ago ", QUIET), facts.rejection(each, sheet.glyphs))
        for each in facts.newest_rejections(snapshot, max(1, most))
    ]
    lines = [sheet.row("broker", used)]
    if most == 0:
        return [*lines, sheet.row("refused", [*parts, *last])]
    return [*lines, sheet.row("refused", parts), *(sheet.row("", [line]) for line in last)]


class Panel(NamedTuple):
    """A figure over time, what it is now, and how it is written.

    `recent`: the curve is scaled by its newer half, as `recent_scale` says.
    """

    name: str
    values: Sequence[float | None]
    now: float | None
    written: Callable[[float], str]
    recent: bool = True

    def draw(self, sheet: Sheet, rows: int) -> list[Text]:
        """Caption and curve; with `rows` 1 both on one line."""
        glyphs = sheet.glyphs
        now = glyphs.none if self.now is None else self.written(self.now)
        caption = Text.assemble((f"{self.name} ", QUIET), (now, "bold"))
        cells = max(1, sheet.width - caption.cell_len - 1) if rows == 1 else sheet.width
        shown = [v for v in self.values[-cells:] if v is not None and math.isfinite(v)]
        scale = (0.0, 0.0)
        if shown:
            scale = recent_scale(shown) if self.recent else (min(shown), max(shown))
        chart = glyphs.chart(self.values, cells, rows, scale)
        if rows == 1:
            return [caption.append(f" {chart[0].rstrip()}")]
        low, high = (self.written(value) for value in scale)
        if len(shown) > 1 and low != high:
            # The same signs are in the curve, where a value is beyond the end that has one here.
            below = glyphs.below if min(shown) < scale[0] else ""
            above = glyphs.above if max(shown) > scale[1] else ""
            span = f"  {below}{low} to {high}{above}"
            if caption.cell_len + len(span) <= sheet.width:
                caption.append(span, QUIET)
        return [caption, *(Text(line) for line in chart)]


def curves(scene: Scene, snapshot: Snapshot, sheet: Sheet, rows: int) -> list[Text]:
    """Loss, time of a round (or staleness of a push), network, and the norm where there is room.

    With `rows` 1 each is a sparkline behind its figure, else a curve of `rows` lines below it.
    """
    points = [closed for _, closed in scene.series.rounds]
    network = [rate.up + rate.down for rate in scene.series.network]
    last, known = snapshot.last_round or LastRound(0), snapshot.last_round is not None
    if snapshot.mode == "async":
        stale, now = [float(point.staleness) for point in points], float(last.staleness)
        middle = Panel("staleness", stale, now if known else None, "{:.0f}".format, recent=False)
    else:
        took = [point.seconds for point in points]
        middle = Panel("round", took, last.seconds if known else None, duration)
    rate = network[-1] if network else None
    panels = [
        Panel("loss", [point.loss for point in points], last.loss, notation.number),
        middle,
        Panel("net", network, rate, lambda rate: f"{notation.byte_size(rate)}/s", recent=False),
    ]
    if sheet.width >= FOUR_CURVES:
        norms = [point.delta_norm for point in points]
        panels.append(Panel("delta norm", norms, last.delta_norm, "{:.2g}".format))
    each = Sheet((sheet.width - 2 * (len(panels) - 1)) // len(panels), sheet.glyphs)
    return beside([(panel.draw(each, rows), each.width) for panel in panels])


def verdict(scene: Scene, sheet: Sheet) -> tuple[Text, tuple[str, ...]]:
    """The word of the verdict with its sign, and the reasons."""
    found = scene.model.verdict(scene.now)
    style = OK if found.healthy else UNEASY
    return Text(*notation.marked(found.word.upper(), style, sheet.glyphs)), found.reasons


def events(snapshot: Snapshot, sheet: Sheet, room: int, most: int) -> list[Text]:
    """The newest events that fit into `room` lines, the newest last, none with more than `most`."""
    lines: list[Text] = []
    for event in sorted(snapshot.events, key=lambda event: event.sequence, reverse=True):
        if len(lines) >= room:
            break
        lines[:0] = happened(event, sheet, most)
    return lines[-room:] if room > 0 else []


def happened(event: Event, sheet: Sheet, most: int | None = None) -> list[Text]:
    """One event, with its level where that is more than news, on at most `most` lines."""
    text = event.text if event.level == "info" else f"{event.level}: {event.text}"
    style = notation.LEVEL_STYLES.get(event.level, "")
    if most == 1 or (most and cell_len(sheet.glyphs.printable(text)) <= sheet.width - LABEL):
        return [sheet.row(_ago(event.age_s), [sheet.text(text, style)])]
    lines = aged(event.age_s, text, sheet, style)
    return lines if most is None else sheet.first(lines, most, gap=1, style=style)


def aged(age_s: float, text: str, sheet: Sheet, style: str = "") -> list[Text]:
    """A sentence behind its age, on as many lines as it needs."""
    return sheet.flow(Text(_ago(age_s), QUIET), sheet.words(text, style), gap=1)


def _ago(age_s: float) -> str:
    return f"{duration(age_s):>5} ago"
