"""Where a value stands on an axis, from 0 to 1, and which round values are written beside it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import ceil, floor, isfinite, log10
from typing import NamedTuple

from diloco_tools.monitor.feed.series import recent_scale
from diloco_tools.monitor.report.drawing.wording import moment
from diloco_tools.monitor.report.thinning import Point

DAY_S = 86400.0
STEPS_S = (
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    10800,
    21600,
    43200,
    DAY_S,
)
# A time without a broker that would take more of the axis than this is drawn as long as this.
LONGEST_AWAY = 0.06
LEAST_FOR_JUMPS = 4  # with fewer values, what is usual is unknown
JITTER = 0.1  # of a value: so much it varies at least
JUMPS_ABOVE = 0.95  # of all values, those that are far above that share are jumps
OFF_SCALE = 8.0  # times the newer half's range: then that decides the scale


ALIKE = 1e-12  # of their size: values that differ by less are drawn as one
TINY = 1e-300  # smaller ones cannot be divided by


class Tick(NamedTuple):
    place: float  # 0 to 1
    text: str


def ticks(low: float, high: float, about: int) -> list[float]:
    """About so many round numbers from low to high."""
    raw = (high - low) / max(1, about)
    if not (raw > 0 and isfinite(raw)):
        return [low]
    power = 10.0 ** floor(log10(raw))
    step = next(f for f in (1, 2, 5, 10) if f * power >= raw * 0.999) * power
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [float(f"{each * step:.12g}") for each in range(first, last + 1)]


class Scale(NamedTuple):
    """The range of values that a curve has room for."""

    low: float
    high: float

    def place(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def scale_of(values: Sequence[float], *, from_zero: bool, may_jump: bool = False) -> Scale:
    """Room for all values; where a few would flatten all others, for those near the newer half.

    `may_jump`: a few high ones may be left out wherever they are, also among the newest.
    """
    low, high = min(values), max(values)
    usual = _without_jumps(values) if may_jump else values
    near_low, near_high = recent_scale(usual)
    if high - low > OFF_SCALE * (near_high - near_low) > 0:
        low, high = near_low, near_high
    low = min(0.0, low) if from_zero else low
    size = max(abs(low), abs(high))
    room = high - low
    if room <= ALIKE * size:  # a flat line lies in the middle
        room = size if size > TINY else 1.0
    return Scale(low if from_zero and low == 0 else low - 0.06 * room, high + 0.06 * room)


def _without_jumps(values: Sequence[float]) -> Sequence[float]:
    """Without those far above 95% of all (or all but one): rounds that a pause interrupted."""
    if len(values) < LEAST_FOR_JUMPS:
        return values
    ranked = sorted(values)
    most = ranked[min(len(ranked) - 2, int(JUMPS_ABOVE * len(ranked)))]
    room = OFF_SCALE * max(most - ranked[0], JITTER * abs(most))
    return [value for value in values if value <= most + room]


def is_within(times: Sequence[tuple[float, float]], before: Point, after: Point) -> bool:
    """Does one of these times, which are in order, lie between two points?"""
    index = bisect_left(times, (before.at, before.at))
    return index < len(times) and times[index][1] <= after.at


class NumberAxis:
    """Rounds by their numbers."""

    def __init__(self, points: Sequence[Point], word: str) -> None:
        numbers = [point.number for point in points]
        self._low, self._high = min(numbers), max(numbers)
        self._word = word

    def place(self, point: Point) -> float:
        span = self._high - self._low
        return (point.number - self._low) / span if span else 0.5

    def is_break(self, before: Point, after: Point) -> bool:
        """The broker went on from an older version."""
        return after.number < before.number

    def ticks(self) -> list[Tick]:
        span = self._high - self._low
        if not span:
            return [Tick(0.5, f"{self._word} {self._low}")]
        found = [each for each in ticks(self._low, self._high, 5) if each == int(each)]
        texts = [f"{self._word} {found[0]:.0f}", *(f"{each:.0f}" for each in found[1:])]
        places = [(each - self._low) / span for each in found]
        return [Tick(place, text) for place, text in zip(places, texts, strict=True)]


def _joined(times: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same in order; those that overlap are one."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(times):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


class TimeAxis:
    """Time by the broker's clock; long times without a broker, and long pauses, are drawn short."""

    def __init__(
        self,
        began: float,
        ended: float,
        away: Sequence[tuple[float, float]],
        pauses: Sequence[tuple[float, float]] = (),
    ) -> None:
        """`away`: times without a broker; like `pauses` in order, within the other two."""
        self.began, self.ended = began, max(ended, began + 1.0)
        self.away = list(away)
        self._short = _joined([*away, *pauses])
        absent = sum(end - start for start, end in self._short)
        longest = LONGEST_AWAY * max(1.0, self.ended - self.began - absent)
        # Pairs of (moment, place); between two of them time goes evenly.
        self._moments, self._places = [self.began], [0.0]
        for start, end in self._short:
            self._reach(start, start - self._moments[-1])
            self._reach(end, min(end - start, longest))
        self._reach(self.ended, self.ended - self._moments[-1])
        whole = self._places[-1]
        self._places = [each / whole for each in self._places]

    def _reach(self, at: float, length: float) -> None:
        self._moments.append(at)
        self._places.append(self._places[-1] + length)

    def at(self, at: float) -> float:
        """Where a moment is."""
        index = min(max(bisect_right(self._moments, at) - 1, 0), len(self._moments) - 2)
        start, end = self._moments[index : index + 2]
        first, last = self._places[index : index + 2]
        share = min(1.0, max(0.0, (at - start) / (end - start))) if end > start else 0.0
        return first + share * (last - first)

    def place(self, point: Point) -> float:
        return self.at(point.at)

    def is_break(self, before: Point, after: Point) -> bool:
        """The broker was away in between."""
        return is_within(self.away, before, after)

    def ticks(self) -> list[Tick]:
        shown = self.ended - self.began - sum(end - start for start, end in self._short)
        step = next((each for each in STEPS_S if each * 6 >= shown), 0.0)
        step = step or DAY_S * ceil(shown / DAY_S / 6)
        found: list[Tick] = []
        first, last = ceil(self.began / step), floor(self.ended / step)
        # The broker may have been away for years: of the steps in there none is asked for.
        places = range(first, last + 1) if last - first < 10_000 else ()
        for at in (place * step for place in places):
            place, is_short = self.at(at), any(start < at < end for start, end in self._short)
            if not is_short and (not found or place - found[-1].place > 0.1):
                found.append(Tick(place, _tick_text(at, step)))
        return found or [Tick(0.0, _tick_text(self.began, 60.0))]


def _tick_text(at: float, step: float) -> str:
    if step < 60:
        return moment(at, "%H:%M:%S")
    if step >= DAY_S or at % DAY_S == 0:
        return moment(at, "%d %b")
    return moment(at, "%H:%M")


Axis = NumberAxis | TimeAxis
