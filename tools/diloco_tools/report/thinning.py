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


class Thinned:
    """At most four points for each of `buckets` stretches."""

    def __init__(self, buckets: int) -> None:
        self.count = 0  # points that were added
        self._most = buckets
        self._length = 1  # points of a stretch
        self._buckets: list[list[Point]] = []
        self._in_last = 0

    def add(self, point: Point) -> None:
        """One more point, later than all before."""
        self.count += 1
        if self._buckets and self._in_last < self._length:
            self._in_last += 1
            self._buckets[-1] = _kept([*self._buckets[-1], point])
            return
        if len(self._buckets) == self._most:
            pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
            self._buckets = [_kept(one + other) for one, other in pairs]
            self._length *= 2
        self._buckets.append([point])
        self._in_last = 1

    def __iter__(self) -> Iterator[Point]:
        for bucket in self._buckets:
            yield from bucket


def _kept(points: list[Point]) -> list[Point]:
    """The first, the lowest, the highest and the last of these, in their order."""
    if len(points) < 3:
        return points
    values = [point.value for point in points]
    places = {0, values.index(min(values)), values.index(max(values)), len(points) - 1}
    return [points[place] for place in sorted(places)]


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
