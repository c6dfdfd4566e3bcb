"""Values over a run, and fewer of them than were recorded: every extreme stays."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple


class Point(NamedTuple):
    """A value at a moment (Unix seconds); `number` is that of its round."""

    at: float
    number: int
    value: float


@dataclass(frozen=True)
class Curve:
    """Values over a run; `count` points, of which those kept have all extremes."""

    name: str
    points: tuple[Point, ...]
    count: int
    absent: tuple[tuple[float, float], ...] = ()  # times in which there could be no point


class Points:
    """Points in the order in which they were made: 24 bytes each, so fewer than their lines had."""

    def __init__(self) -> None:
        self._at, self._numbers, self.values = array("d"), array("q"), array("d")

    def __len__(self) -> int:
        return len(self.values)

    def add(self, at: float, number: int, value: float) -> None:
        self._at.append(at)
        self._numbers.append(number)
        self.values.append(value)

    def thinned(self, stretches: int) -> tuple[Point, ...]:
        """The first, the lowest, the highest and the last of each of so many stretches."""
        length = ceil(len(self) / stretches) or 1
        kept: list[int] = []
        for start in range(0, len(self), length):
            places = range(start, min(start + length, len(self)))
            low, high = (f(places, key=self.values.__getitem__) for f in (min, max))
            kept += sorted({places[0], low, high, places[-1]})
        return tuple(Point(self._at[n], self._numbers[n], self.values[n]) for n in kept)

    def curve(
        self, name: str, stretches: int, absent: tuple[tuple[float, float], ...] = ()
    ) -> Curve:
        return Curve(name, self.thinned(stretches), len(self), absent)


def quantile(values: Sequence[float], share: float) -> float | None:
    """The least value that this share of all does not exceed; None without any."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else None
