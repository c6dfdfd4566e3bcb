"""Workers over time: a row for each, in which its presence, its contributions and its fate are drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from diloco_tools.monitor.report.drawing.axes import TimeAxis
from diloco_tools.monitor.report.drawing.charts import AWAY, BOX, PAUSED, bands, tick_marks
from diloco_tools.monitor.report.drawing.markup import Html, joined, tag, verbatim
from diloco_tools.monitor.report.drawing.wording import duration, moment, plural
from diloco_tools.monitor.report.facts import Mark, Worker

MOST_ROWS = 50
ROW = 20  # pixels
LEAST_WIDTH = 2  # units of the stretched box: a contribution can be seen
NEAR = 0.004  # of the width: marks of one kind that are nearer are one
# Paths of marks, around (0, 0); those that are not here change only the colour of the row.
SHAPES = {
    "joined": "M-3 -6L4 0L-3 6z",
    "back": "M-3 -6L4 0L-3 6z",
    "left": "M-4 -5h8v10h-8z",
    "died": "M-5 -5L5 5M-5 5L5 -5",
    "kicked": "M0 -6L6 0L0 6L-6 0z",
    "revoked": "M0 -6L6 0L0 6L-6 0z",
}
ARRIVED = "joined, or came back"
WORDS = {
    "here": "here at the end",
    "away": "was here when a broker ended, and did not come to the next",
    "joined": "joined",
    "back": "came back",
    "left": "left",
    "died": "counted as dead",
    "kicked": "removed by an operator",
    "revoked": "its key was revoked",
    "": "never here",
}


def presence(
    workers: Sequence[Worker], axis: TimeAxis, pauses: Sequence[tuple[float, float]]
) -> Html:
    """Rows of those that contributed most, in the order in which they came."""
    shown = sorted(workers[:MOST_ROWS], key=lambda each: (each.first_seen, each.id))
    if not shown:
        return tag("p", "No worker has joined.", class_="empty")
    rows = [_row(worker, axis, pauses) for worker in shown]
    foot = tag("svg", *tick_marks(axis, 0), width="100%", height=24, aria_hidden="true")
    rows.append(tag("li", tag("span"), foot, class_="row foot"))
    parts = [tag("ol", *rows, class_="strip"), _key(shown, axis, pauses)]
    more = len(workers) - len(shown)
    if more:
        parts.append(tag("p", f"{plural(more, 'worker')} with fewer contributions not shown."))
    return joined(parts)


def _row(worker: Worker, axis: TimeAxis, pauses: Sequence[tuple[float, float]]) -> Html:
    layers = [
        _stretches(
            ((s.began_at, s.ended_at) for s in worker.spans if s.state == state), axis, state, 3, 14
        )
        for state in ("here", "lost", "stalled")
    ]
    layers.append(_stretches(worker.active, axis, "active", 6, 8))
    box = tag(
        "svg",
        *layers,
        width="100%",
        height=ROW,
        viewBox=f"0 0 {BOX} {ROW}",
        preserveAspectRatio="none",
    )
    told = f"{worker.id}: {in_words(worker)}"
    row = tag(
        "svg",
        tag("title", told),
        tag("line", x1=0, x2="100%", y1=ROW / 2, y2=ROW / 2, class_="grid"),
        box,
        bands(axis, axis.away, AWAY, 0, ROW),
        bands(axis, pauses, PAUSED, 0, ROW),
        _marks(worker.marks, axis),
        width="100%",
        height=ROW,
        role="img",
        aria_label=told,
    )
    return tag("li", tag("span", worker.id, class_="who", title=worker.id), row, class_="row")


def in_words(worker: Worker) -> str:
    """Its presence as a sentence, for who does not see the row."""
    pushes = plural(worker.contributions, "push", "pushes")
    parts = [f"here for {duration(worker.here_s)} of the run", pushes]
    parts += [f"counted as dead {_times(worker.deaths)}"] * bool(worker.deaths)
    parts += [f"removed {_times(worker.kicks)}"] * bool(worker.kicks)
    parts += [f"came back {_times(worker.returns)}"] * bool(worker.returns)
    return f"{', '.join(parts)}; {WORDS.get(worker.ended, worker.ended)}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _stretches(
    times: Iterable[tuple[float, float]], axis: TimeAxis, kind: str, y: int, height: int
) -> Html:
    """Rectangles of one kind in one path; those that touch are one."""
    found: list[list[int]] = []
    for start, end in times:
        x = round(BOX * axis.at(start))
        to = max(x + LEAST_WIDTH, round(BOX * axis.at(end)))
        if found and x <= found[-1][1]:
            found[-1][1] = max(to, found[-1][1])
        else:
            found.append([x, to])
    if not found:
        return verbatim("")
    path = "".join(f"M{x} {y}h{to - x}v{height}H{x}z" for x, to in found)
    return tag("path", d=path, class_=kind)


def _marks(marks: Sequence[Mark], axis: TimeAxis) -> Html:
    found = []
    last: dict[str, float] = {}
    for mark in marks:
        place = axis.at(mark.at)
        if mark.what not in SHAPES or place - last.get(mark.what, -1.0) < NEAR:
            continue
        last[mark.what] = place
        told = tag("title", f"{moment(mark.at)} UTC: {mark.text}")
        shape = tag("path", told, d=SHAPES[mark.what], class_=f"mark {mark.what}")
        # A box without a size of its own: its shape keeps its size wherever it stands.
        x = f"{100 * place:.2f}%"
        found.append(tag("svg", shape, x=x, y=ROW / 2, width=1, height=1, overflow="visible"))
    return joined(found)


def _key(shown: Sequence[Worker], axis: TimeAxis, pauses: Sequence[tuple[float, float]]) -> Html:
    """What the colours and signs mean; of those that are there."""
    states = {span.state for worker in shown for span in worker.spans}
    states |= {"active"} if any(worker.active for worker in shown) else set()
    states |= {"away"} if axis.away else set()
    states |= {"pause"} if pauses else set()
    words = {
        "active": "contributed",
        "here": "here",
        "lost": "its connection was broken",
        "stalled": "stood still",
        "away": "no broker",
        "pause": "the run was paused",
    }
    parts = []
    for state, word in words.items():
        if state in states:
            swatch = tag("svg", tag("rect", width=16, height=12, class_=state), width=16, height=12)
            parts.append(tag("span", swatch, word))
    there = {mark.what for worker in shown for mark in worker.marks}
    for what, shape in SHAPES.items():
        if what in there and (what != "back" or "joined" not in there):
            sign = tag("path", d=shape, class_=f"mark {what}")
            box = tag("svg", sign, width=16, height=14, viewBox="-8 -7 16 14")
            parts.append(tag("span", box, ARRIVED if what == "joined" else WORDS[what]))
    return tag("p", *parts, class_="legend")
