"""Sets of integers, stored as ranges, because assigned, returned and counted units are contiguous."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

# Limit of the ranges in a message; units are assigned contiguously, so far fewer are needed.
MOST_RANGES = 4096
LARGEST = 1 << 62


class Spans:
    """A set of integers. Its memory grows with the number of ranges, not of elements."""

    def __init__(self, *ranges: tuple[int, int]) -> None:
        self._edges: list[int] = []  # start, stop, start, stop: strictly ascending
        for start, stop in ranges:
            self.add(start, stop)

    @classmethod
    def read(cls, flat: Iterable[object], most: int | None = MOST_RANGES) -> Spans:
        """Read a set from its flat form: start, stop, start, stop. Raises ValueError if it is invalid.

        `most` limits the number of ranges; None for files, which may have all ranges of a broker.
        """
        edges = list(flat)
        found = cls()
        found._edges = [edge for edge in edges if type(edge) is int and 0 <= edge < LARGEST]
        is_rising = all(a < b for a, b in zip(found._edges, found._edges[1:], strict=False))
        if len(found._edges) != len(edges) or len(edges) % 2 or not is_rising:
            raise ValueError("ranges must be start, stop, start, stop, each above the last")
        if most is not None and len(edges) > 2 * most:
            raise ValueError(
                f"too many ranges of units are pending: {len(edges) // 2}, the limit is {most}; give "
                "units more samples, or the queue a larger prefetch"
            )
        return found

    @property
    def flat(self) -> tuple[int, ...]:
        return tuple(self._edges)

    @property
    def ranges(self) -> int:
        return len(self._edges) // 2

    @property
    def stop(self) -> int:
        """One more than the largest element; 0 for an empty set."""
        return self._edges[-1] if self._edges else 0

    @property
    def start(self) -> int:
        """The smallest element; the set must not be empty."""
        return self._edges[0]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._edges[::2], self._edges[1::2], strict=True)))

    def __len__(self) -> int:
        return sum(self._edges[1::2]) - sum(self._edges[::2])

    def __bool__(self) -> bool:
        return bool(self._edges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spans) and self._edges == other._edges

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"Spans{tuple(self)}"

    def __contains__(self, number: int) -> bool:
        return bisect_right(self._edges, number) % 2 == 1

    def add(self, start: int, stop: int) -> None:
        """Add the integers from `start` to `stop` - 1."""
        self._put(start, stop, into=True)

    def remove(self, start: int, stop: int) -> None:
        self._put(start, stop, into=False)

    def _put(self, start: int, stop: int, *, into: bool) -> None:
        if start >= stop:
            return
        edges = self._edges
        first, last = bisect_left(edges, start), bisect_right(edges, stop)
        # Keep an edge only between inside and outside; before an edge at an even index is outside.
        new = [start] if (first % 2 == 0) is into else []
        edges[first:last] = new + ([stop] if (last % 2 == 0) is into else [])

    def __or__(self, other: Spans) -> Spans:
        found = self.copy()
        for start, stop in other:
            found.add(start, stop)
        return found

    def __sub__(self, other: Spans) -> Spans:
        found = self.copy()
        for start, stop in other:
            found.remove(start, stop)
        return found

    def __and__(self, other: Spans) -> Spans:
        return self - (self - other)

    def copy(self) -> Spans:
        found = Spans()
        found._edges = list(self._edges)
        return found

    def first(self, count: int) -> Spans:
        """The `count` smallest elements, or all if there are fewer."""
        found = Spans()
        for start, stop in self:
            if count <= 0:
                break
            found.add(start, min(stop, start + count))
            count -= stop - start
        return found
