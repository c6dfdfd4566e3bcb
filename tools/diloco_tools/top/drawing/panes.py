"""The parts of the full screen: header, facts, curves, verdict, events. Pure.

Each gives lines no wider than asked; `diloco_tools.top.drawing.full_screen` puts them together.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from diloco_protocol.feed import LastRound, Snapshot
from diloco_tools.feed.model import Freshness
from diloco_tools.feed.series import recent_scale
from diloco_tools.top.drawing import facts
from diloco_tools.top.drawing.lines import LABEL, apart, beside, cut, flow, one_line
from diloco_tools.top.drawing.notation import (
    BAD,
    LEVEL_STYLES,
    QUIET,
    UNEASY,
    Glyphs,
    byte_size,
    duration,
    freshness_mark,
    number,
    scaled,
    verdict_mark,
)
from diloco_tools.top.drawing.scene import Scene

# The whole line turns: nobody should read old figures as new ones.
HEADER_STYLES = {Freshness.LATE: f"bold reverse {UNEASY}", Freshness.STALE: f"bold reverse {BAD}"}
NAMED_REPLAY = 100  # columns from which the header of a replay has room for our name
FOUR_CURVES = 110  # columns from which there is room for the norm of the deltas


def header(scene: Scene, width: int, glyphs: Glyphs) -> Text:
    """Whose run this is, and how much to believe of it."""
    snapshot = scene.model.snapshot
    # The time of a replay needs the room, and whoever gave a history knows what shows it.
    bare = scene.replay is not None and width < NAMED_REPLAY
    left = Text() if bare else Text.assemble(("diloco-top", "bold"), "  ")
    words = []
    if snapshot is not None:
        name = facts.run_name(snapshot)
        words.append(f"run {name}" if name else "no run yet")
        if snapshot.model is not None:
            words.append(scaled(snapshot.model.parameters))
        words.append(snapshot.mode)
    right = _freshness(scene, glyphs)
    rest = glyphs.clip(glyphs.printable("  ".join(["", *words])), width // 2)
    room = width - left.cell_len - cell_len(rest) - right.cell_len - 4
    if not bare:
        left.append(glyphs.clip(glyphs.printable(scene.address), max(8, room)))
    left.append(rest.lstrip() if bare else rest)
    line = Text(" ") + apart(left, right, width - 2, glyphs) + Text(" ")
    if scene.replay is None and (turned := HEADER_STYLES.get(scene.fresh)):
        line = Text(line.plain)
        line.stylize(turned)  # as a span: Text leaves the style of its own to whoever prints it
    return line


def _freshness(scene: Scene, glyphs: Glyphs) -> Text:
    if (replay := scene.replay) is not None:
        sign = f"{glyphs.play} x{replay.speed}" if replay.playing else "stopped"
        where = f"{replay.place}/{replay.moments} {sign}"
        return Text(f"REPLAY {replay.clock}  ", UNEASY).append(where)
    text = Text()
    if scene.readonly:
        text.append("readonly  ", QUIET)
    if scene.frozen_s is not None:
        text.append(f"FROZEN {duration(scene.frozen_s)}  ", UNEASY)
    if scene.model.restarts:
        text.append(facts.plural(scene.model.restarts, "restart") + "  ", UNEASY)
    if scene.model.missed:
        text.append(f"{scene.model.missed} missed  ", UNEASY)
    mark, style = freshness_mark(scene.fresh, glyphs)
    return text.append(f"{mark} {duration(scene.age_s)}", f"bold {style}")


def run_rows(
    scene: Scene, snapshot: Snapshot, width: int, most: int, *, limits: bool, glyphs: Glyphs
) -> list[Text]:
    """Round, workers, optimizer, fragments, and with `limits` what the run was told beside them; no row
    has more than `most` lines.
    """
    state = Text() if snapshot.state == "training" else facts.state_part(snapshot, glyphs)
    room = width - state.cell_len - 2 * bool(state.plain)
    if snapshot.mode == "async":
        now = _row("applied", facts.applied_parts(snapshot), room, glyphs)
    else:
        now = _row("round", facts.round_parts(snapshot, glyphs), room, glyphs)
    lines = [apart(now, state, width, glyphs)]
    last = facts.last_parts(snapshot)
    counts = (*facts.counts_parts(snapshot), *(("last:", *last) if last and width > 120 else ()))
    lines.append(_row("workers", counts, width, glyphs))
    outer = (
        *facts.optimizer_parts(snapshot),
        *facts.terms_parts(snapshot),
        *facts.merging_parts(snapshot),
        *facts.reducing_parts(snapshot),
    )
    lines += _rows("outer", outer, width, most, glyphs)
    told = (*facts.asynchronous_parts(snapshot), *facts.liveness_parts(snapshot))
    if limits and any(told):
        lines += _rows("limits", told, width, most, glyphs)
    if snapshot.fragments:
        wordy = width > 120
        parts = [facts.fragment_part(f, snapshot, wordy=wordy) for f in snapshot.fragments]
        label = "fragments" if len(parts) > 1 else "fragment"
        lines += _rows(label, parts, width, max(2, most), glyphs)
    return lines


def broker_rows(
    scene: Scene, snapshot: Snapshot, width: int, most: int, glyphs: Glyphs
) -> list[Text]:
    """What the broker takes, its newest checkpoint, and what it refused.

    The last `most` refusals have a line each, the newest first; with 0 the last one has what is left
    of the line with the counts.
    """
    up = f"up {duration(snapshot.uptime_s)}"
    used = (up, *facts.loop_parts(snapshot, scene.cpu), *facts.checkpoint_parts(snapshot, glyphs))
    lines = [_row("broker", used, width, glyphs)]
    totals = snapshot.totals
    why = facts.reasons(snapshot)
    counts = facts.count(totals.rejected, "rejected", UNEASY)
    parts: list[facts.Part] = [Text.assemble(counts, f": {glyphs.printable(why)}" if why else "")]
    if totals.malformed:
        parts.append(facts.count(totals.malformed, "malformed", UNEASY))
    last = [
        Text.assemble((f"{duration(refused.age_s)} ago ", QUIET), facts.rejection(refused, glyphs))
        for refused in facts.newest_rejections(snapshot, max(1, most))
    ]
    if most == 0:
        return [*lines, _row("refused", [*parts, *last], width, glyphs)]
    lines.append(_row("refused", parts, width, glyphs))
    return lines + [one_line(Text(), [line], width, glyphs) for line in last]


def _row(label: str, parts: Sequence[facts.Part], width: int, glyphs: Glyphs) -> Text:
    return one_line(Text(label, QUIET), facts.texts(parts, glyphs), width, glyphs)


def _rows(
    label: str, parts: Sequence[facts.Part], width: int, most: int, glyphs: Glyphs
) -> list[Text]:
    if most == 1:
        return [_row(label, parts, width, glyphs)]
    lines = flow(Text(label, QUIET), facts.texts(parts, glyphs), width, glyphs)
    if len(lines) > most:
        lines[most - 1] = cut(lines[most - 1] + Text(f"  {glyphs.ellipsis}"), width, glyphs)
    return lines[:most]


def curves(scene: Scene, snapshot: Snapshot, width: int, rows: int, glyphs: Glyphs) -> list[Text]:
    """Loss, time of a round (or staleness of a push), network, and the norm where there is room.

    With `rows` 1 each is a sparkline behind its figure, else a curve of `rows` lines below it.
    """
    points = [closed for _, closed in scene.series.rounds]
    network = [rate.up + rate.down for rate in scene.series.network]
    last = snapshot.last_round or LastRound(0)
    known = snapshot.last_round is not None
    panels = [
        Panel("loss", [point.loss for point in points], last.loss, number, recent=True),
        Panel(
            "net", network, network[-1] if network else None, lambda rate: f"{byte_size(rate)}/s"
        ),
    ]
    if snapshot.mode == "async":
        stale = [float(point.staleness) for point in points]
        panels.insert(
            1, Panel("staleness", stale, float(last.staleness) if known else None, "{:.0f}".format)
        )
    else:
        took = [point.seconds for point in points]
        panels.insert(
            1, Panel("round", took, last.seconds if known else None, duration, recent=True)
        )
    if width >= FOUR_CURVES:
        norms = [point.delta_norm for point in points]
        panels.append(Panel("delta norm", norms, last.delta_norm, "{:.2g}".format, recent=True))
    each = (width - 2 * (len(panels) - 1)) // len(panels)
    return beside([(_panel(panel, each, rows, glyphs), each) for panel in panels])


@dataclass(frozen=True)
class Panel:
    """A figure over time, what it is now, and how it is written.

    `recent`: the curve is scaled by its newer half, as `recent_scale` says.
    """

    name: str
    values: Sequence[float | None]
    now: float | None
    written: Callable[[float], str]
    recent: bool = False


def _panel(panel: Panel, width: int, rows: int, glyphs: Glyphs) -> list[Text]:
    now = glyphs.none if panel.now is None else panel.written(panel.now)
    caption = Text.assemble((f"{panel.name} ", QUIET), (now, "bold"))
    cells = max(1, width - caption.cell_len - 1) if rows == 1 else width
    shown = [v for v in panel.values[-cells:] if v is not None and math.isfinite(v)]
    scale = (recent_scale if panel.recent else _whole)(shown) if shown else (0.0, 0.0)
    chart = glyphs.chart(panel.values, cells, rows, scale)
    if rows == 1:
        return [caption.append(f" {chart[0].rstrip()}")]
    low, high = (panel.written(value) for value in scale)
    if len(shown) > 1 and low != high:
        # The same signs are in the curve, where a value is beyond the end that has one here.
        below = glyphs.below if min(shown) < scale[0] else ""
        above = glyphs.above if max(shown) > scale[1] else ""
        span = f"  {below}{low} to {high}{above}"
        if caption.cell_len + len(span) <= width:
            caption.append(span, QUIET)
    return [caption, *(Text(line) for line in chart)]


def _whole(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def verdict(scene: Scene, width: int, most: int, glyphs: Glyphs) -> list[Text]:
    """The verdict and its reasons: on one line if there is but one, else a line for each."""
    found = scene.model.verdict(scene.now)
    mark, style = verdict_mark(found.word, glyphs)
    if not found.reasons:
        return [Text(mark, style)]
    label = Text(f"{mark}  ", style)
    reasons = [Text(glyphs.printable(reason)) for reason in found.reasons]
    if most == 1:
        return [cut(Text.assemble(label, Text("; ").join(reasons)), width, glyphs)]
    shown = reasons[:most]
    if len(reasons) > most:
        shown[-1] = Text(f"and {len(reasons) - most + 1} more")
    indent = Text(" " * label.cell_len)
    return [
        cut(Text.assemble(indent if i else label, text), width, glyphs)
        for i, text in enumerate(shown)
    ]


def events(snapshot: Snapshot, width: int, room: int, most: int, glyphs: Glyphs) -> list[Text]:
    """The newest events that fit into `room` lines, the newest last, none with more than `most`."""
    lines: list[Text] = []
    for event in sorted(snapshot.events, key=lambda event: event.sequence, reverse=True):
        if len(lines) >= room:
            break
        style = LEVEL_STYLES.get(event.level, "")
        said = glyphs.printable(event.text)
        if event.level != "info":
            said = f"{glyphs.printable(event.level)}: {said}"
        label = Text(f"{duration(event.age_s):>5} ago", QUIET)
        if most == 1 or cell_len(said) <= width - LABEL:
            block = [one_line(label, [Text(said, style)], width, glyphs)]
        else:
            words = [Text(word, style) for word in said.split()]
            block = flow(label, words, width, glyphs, gap=1)
            if len(block) > most:
                sign = Text(f" {glyphs.ellipsis}", style)
                block[most - 1 :] = [cut(block[most - 1] + sign, width, glyphs)]
        lines[:0] = block
    return lines[-room:] if room > 0 else []


def silence(scene: Scene, width: int, glyphs: Glyphs) -> list[Text]:
    """What to do while no snapshot has come yet."""
    said = (
        f"No snapshot has come from {glyphs.printable(scene.address)} yet. Start diloco-broker "
        "serve, or give the feed address that it printed (the control address has another port). "
        "This screen fills as soon as the broker is there."
    )
    return flow(Text(), [Text(word) for word in said.split()], width, glyphs, indent=0, gap=1)
