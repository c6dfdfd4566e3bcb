"""Charts as inline SVG: pure functions from curves to markup, without a script.

A chart is as wide as its place: lines are drawn in a box that is stretched (their width is not), and
texts stand at shares of the width, so letters keep their size on a phone. What a pointer is told comes
from `<title>`, which every browser shows by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diloco_tools.monitor.report.drawing.axes import (
    Axis,
    Scale,
    TimeAxis,
    is_within,
    scale_of,
    ticks,
)
from diloco_tools.monitor.report.drawing.markup import Html, joined, tag, verbatim
from diloco_tools.monitor.report.drawing.wording import duration, figure, moment, on_axis, plural
from diloco_tools.monitor.report.facts import Curve
from diloco_tools.monitor.report.thinning import Point

HEIGHT, TOP, FOOT = 150, 6, 24  # of a plot, pixels; the scale stands below it
BOX = 1000  # units of the stretched box, in both directions
FAR = 3 * BOX  # what is off the scale ends there
HUES = 8  # colours in the style sheet; further lines are grey
COLUMNS = 120  # places where a pointer is told of values
IN_WORDS = 8  # values in one title


class Band(NamedTuple):
    """A kind of stretches of time: its name in the style sheet, and what is said of one."""

    name: str
    word: str


AWAY, PAUSED = Band("away", "no broker"), Band("pause", "paused")
Format = Callable[[float], str]


@dataclass(frozen=True)
class Plot:
    """What a chart shows, and how its values are written. `word`: of what its points have numbers."""

    title: str
    unit: str
    word: str = "round"
    format: Format = figure
    axis_format: Format = on_axis
    from_zero: bool = True
    may_jump: bool = False  # a few values may be far above all others, and say nothing of these
    empty: str = "Nothing of it is in the history."


def line_chart(
    plot: Plot, curves: Sequence[Curve], axis: Callable[[Sequence[Point]], Axis]
) -> Html:
    """A figure with one line for each curve that has points."""
    curves = [curve for curve in curves if curve.points]
    heading = tag("h3", plot.title, tag("span", f" {plot.unit}", class_="dim"))
    if not curves:
        return tag("figure", heading, tag("p", plot.empty, class_="empty"), class_="plot")
    points = [point for curve in curves for point in curve.points]
    across = axis(points)
    scale = scale_of(
        [point.value for point in points], from_zero=plot.from_zero, may_jump=plot.may_jump
    )
    lines = [
        _line(curve, place, across, scale) for place, curve in reversed(list(enumerate(curves)))
    ]
    box = tag(
        "svg",
        *lines,
        y=TOP,
        width="100%",
        height=HEIGHT,
        viewBox=f"0 0 {BOX} {BOX}",
        preserveAspectRatio="none",
    )
    grid, labels = _scale_lines(plot, scale)
    area = tag(
        "svg",
        grid,
        _away(across),
        box,
        _foot(across),
        _hits(plot, curves, across),
        width="100%",
        height=TOP + HEIGHT + FOOT,
        role="img",
        aria_label=f"{plot.title}: {_in_words(plot, curves)}",
    )
    side = tag("svg", labels, width=54, height=TOP + HEIGHT + FOOT, aria_hidden="true")
    parts = [heading, _readout(plot, curves), tag("div", side, area, class_="chart")]
    off = [p.value for p in points if not scale.low <= p.value <= scale.high]
    if off:
        parts.append(tag("p", _cut(plot, off), class_="cut dim"))
    return tag("figure", *parts, class_="plot")


def hue(place: int) -> str:
    return f"s{place + 1}" if place < HUES else "rest"


def _line(curve: Curve, place: int, axis: Axis, scale: Scale) -> Html:
    parts: list[str] = []
    before: Point | None = None
    absent = sorted(curve.absent)
    for point in curve.points:
        x = round(BOX * axis.place(point))
        y = round(max(-FAR, min(FAR, BOX - BOX * scale.place(point.value))))
        if before is None or axis.is_break(before, point) or is_within(absent, before, point):
            parts.append(f"M{x} {y}h0")  # a point alone is a dot
        else:
            parts.append(f"L{x} {y}")
        before = point
    return tag("path", d="".join(parts), class_=f"curve {hue(place)}")


def _scale_lines(plot: Plot, scale: Scale) -> tuple[Html, Html]:
    """Lines of the grid, and the values beside them."""
    lines, texts = [], []
    for value in ticks(scale.low, scale.high, 5):
        y = round(TOP + HEIGHT * (1 - scale.place(value)), 1)
        lines.append(tag("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
        texts.append(tag("text", plot.axis_format(value), x=47, y=y, class_="y"))
    return joined(lines), joined(texts)


def _away(axis: Axis) -> Html:
    """Times without a broker."""
    if not isinstance(axis, TimeAxis):
        return verbatim("")
    return bands(axis, axis.away, AWAY, TOP, HEIGHT)


def bands(
    axis: TimeAxis, times: Sequence[tuple[float, float]], kind: Band, top: float, height: float
) -> Html:
    """Stretches of time over the whole height of a chart."""
    found = []
    for start, end in times:
        x, to = axis.at(start), axis.at(end)
        told = tag("title", f"{kind.word} for {duration(end - start)}, from {moment(start)} UTC")
        width = _percent(max(0.0015, to - x))
        found.append(
            tag("rect", told, x=_percent(x), width=width, y=top, height=height, class_=kind.name)
        )
    return joined(found)


def _foot(axis: Axis) -> Html:
    base = TOP + HEIGHT
    parts = [tag("line", x1=0, x2="100%", y1=base, y2=base, class_="base")]
    return joined([*parts, *tick_marks(axis, base)])


def tick_marks(axis: Axis, top: float) -> list[Html]:
    """The scale beneath a chart; every second text is left out where there is little room."""
    parts = []
    for count, (place, text) in enumerate(axis.ticks()):
        x = _percent(place)
        anchor = "start" if place < 0.06 else "end" if place > 0.94 else "middle"
        parts.append(tag("line", x1=x, x2=x, y1=top, y2=top + 4, class_="tick"))
        kind = "x odd" if count % 2 else "x"
        parts.append(tag("text", text, x=x, y=top + 18, text_anchor=anchor, class_=kind))
    return parts


def _hits(plot: Plot, curves: Sequence[Curve], axis: Axis) -> Html:
    """Columns that tell of the values in them."""
    columns: dict[int, dict[int, list[Point]]] = {}
    for place, curve in enumerate(curves):
        for point in curve.points:
            column = min(COLUMNS - 1, int(COLUMNS * axis.place(point)))
            columns.setdefault(column, {}).setdefault(place, []).append(point)
    found = []
    for column, there in sorted(columns.items()):
        newest = max((points[-1] for points in there.values()), key=lambda point: point.at)
        told = [f"{plot.word} {newest.number}, {moment(newest.at)} UTC"]
        for place, points in sorted(there.items())[:IN_WORDS]:
            low, high = (f(point.value for point in points) for f in (min, max))
            values = plot.format(low)
            if plot.format(high) != values:
                values = f"{values} to {plot.format(high)}"
            told.append(f"{curves[place].name} {values}".strip())
        width = _percent(1 / COLUMNS)
        title = tag("title", "\n".join(told))
        x = _percent(column / COLUMNS)
        found.append(tag("rect", title, x=x, width=width, y=TOP, height=HEIGHT, class_="hit"))
    return joined(found)


def _readout(plot: Plot, curves: Sequence[Curve]) -> Html:
    if len(curves) == 1 and not curves[0].name:
        return tag("p", _in_words(plot, curves), class_="readout")
    parts: list[str] = []
    for place, curve in enumerate(curves[:HUES]):
        key = tag("i", class_=f"key {hue(place)}")
        value = plot.format(curve.points[-1].value)
        parts.append(tag("span", key, f"{curve.name} {value}", class_="value"))
    if len(curves) > HUES:
        parts.append(tag("span", f"and {len(curves) - HUES} more in grey", class_="value dim"))
    return tag("p", *parts, class_="readout")


def _in_words(plot: Plot, curves: Sequence[Curve]) -> str:
    if len(curves) > 1 or curves[0].name:
        values = [f"{c.name} {plot.format(c.points[-1].value)}" for c in curves[:IN_WORDS]]
        return f"last {', '.join(values)}"
    points = curves[0].points
    low = min(points, key=lambda point: point.value)
    high = max(points, key=lambda point: point.value)
    return (
        f"last {plot.format(points[-1].value)} · "
        f"from {plot.format(low.value)} ({plot.word} {low.number}) "
        f"to {plot.format(high.value)} ({plot.word} {high.number})"
    )


def _cut(plot: Plot, off: Sequence[float]) -> str:
    values = plot.format(min(off))
    if plot.format(max(off)) != values:
        values = f"{values} to {plot.format(max(off))}"
    verb = "is" if len(off) == 1 else "are"
    return f"{plural(len(off), 'value')} ({values}) {verb} off the scale."


def bars(title: str, unit: str, rows: Sequence[tuple[str, int]], empty: str) -> Html:
    """Counts as horizontal bars, each with its number: a histogram that reads as a table."""
    heading = tag("h3", title, tag("span", f" {unit}", class_="dim"))
    if not rows:
        return tag("figure", heading, tag("p", empty, class_="empty"), class_="plot")
    most, all_ = max(count for _, count in rows), sum(count for _, count in rows)
    lines = []
    for name, count in rows:
        share = f"{count:,} ({100 * count / all_:.1f}%)"
        width = _percent(count / most if most else 0.0)
        bar = tag("svg", tag("rect", width=width, height=12, class_="bar"), width="100%", height=12)
        lines.append(tag("tr", tag("th", name, scope="row"), tag("td", bar), tag("td", share)))
    return tag("figure", heading, tag("table", *lines, class_="bars"), class_="plot")


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"
