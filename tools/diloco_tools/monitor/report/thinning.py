"""Curves of any length in bounded memory: what is left out lies between what is kept.

`Thinned` takes points one by one, in the order in which they were made. It keeps the first, the lowest,
the highest and the last of each of at most `buckets` stretches of equal length; once there are more
stretches than that, two neighbours become one. So no peak is ever lost, whatever the length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import exp, floor, log
from typing import NamedTuple

# A stretch of quantiles: each is at most 2% longer than where it begins.
LOG_STEP = log(1.02)


class Point(NamedTuple):
    """A value at a moment (Unix seconds); `number` is that of the round it is of."""

    at: float
    number: int
    value: float


class _Stretch:
    """Points that follow each other: four of them, with their places in the whole."""

    __slots__ = ("first", "high", "last", "low", "places")

    def __init__(self, point: Point, place: int) -> None:
        self.first = self.low = self.high = self.last = point
        self.places = [place, place, place, place]

    def add(self, point: Point, place: int) -> None:
        value = point.value
        if value < self.low.value:
            self.low = point
            self.places[1] = place
        elif value > self.high.value:
            self.high = point
            self.places[2] = place
        self.last = point
        self.places[3] = place

    def join(self, later: _Stretch) -> _Stretch:
        """Both as one."""
        if later.low.value < self.low.value:
            self.low, self.places[1] = later.low, later.places[1]
        if later.high.value > self.high.value:
            self.high, self.places[2] = later.high, later.places[2]
        self.last, self.places[3] = later.last, later.places[3]
        return self

    def points(self) -> Iterator[Point]:
        """The first, the lowest, the highest and the last, each once, in their order."""
        kept = dict(zip(self.places, (self.first, self.low, self.high, self.last), strict=True))
        for place in sorted(kept):
            yield kept[place]


class Thinned:
    """At most four points for each of `buckets` stretches, an even number."""

    def __init__(self, buckets: int) -> None:
        self.count = 0  # points that were added
        self._most = buckets
        self._length = 1  # points of a stretch
        self._stretches: list[_Stretch] = []

    def add(self, point: Point) -> None:
        """One more point, later than all before."""
        place = self.count
        self.count += 1
        if place % self._length:
            self._stretches[-1].add(point, place)
            return
        if len(self._stretches) == self._most:
            pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
            self._stretches = [one.join(other) for one, other in pairs]
            self._length *= 2
        self._stretches.append(_Stretch(point, place))

    def __iter__(self) -> Iterator[Point]:
        for stretch in self._stretches:
            yield from stretch.points()


class Spread:
    """Quantiles of values that are not negative, to 2%: how many lie in stretches of equal ratio."""

    def __init__(self) -> None:
        self.count = 0
        self.longest = 0.0
        self._zeros = 0
        self._stretches: Counter[int] = Counter()

    def add(self, value: float) -> None:
        self.count += 1
        self.longest = max(self.longest, value)
        if value > 0:
            self._stretches[floor(log(value) / LOG_STEP)] += 1
        else:
            self._zeros += 1

    def quantile(self, share: float) -> float | None:
        """The value below which this share of all lies; None without any."""
        if not self.count:
            return None
        left = share * self.count - self._zeros
        if left <= 0:
            return 0.0
        for stretch in sorted(self._stretches):
            left -= self._stretches[stretch]
            if left <= 0:
                return min(self.longest, exp((stretch + 0.5) * LOG_STEP))
        return self.longest
