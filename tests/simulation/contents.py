"""What a chunk of parameters contains: the pushes of the version that it was made from, and some more.

Versions form a tree, nearly always a single line: a broker that comes back without the latest one begins
a branch. So the contents of a version are kept as what it has more than the one before, and whether a
push is in it is a question about its place in the tree. A week of pushes takes no more room than that.
"""

from __future__ import annotations

from collections.abc import Iterable

Key = tuple[str, int]  # (worker id, push id)


class Line:
    """Versions made one from the other. `parent` is what the first of them was made from."""

    def __init__(self, parent: Contents | None) -> None:
        self.parent = parent
        self.tip: Contents | None = None


class Contents:
    """Two are the same only if they are one object.

    Attributes:
        depth: versions before this one.
    """

    __slots__ = ("_line", "_places", "depth")

    def __init__(self) -> None:
        """Nothing: the parameters that a run begins with."""
        self.depth = 0
        self._line = Line(None)
        self._line.tip = self
        self._places: dict[Key, list[Contents]] = {}  # where each was added; on branches, again

    def plus(self, keys: Iterable[Key]) -> Contents:
        """The contents of a version made from this one."""
        made = object.__new__(Contents)
        made.depth = self.depth + 1
        made._line = self._line if self._line.tip is self else Line(self)
        made._line.tip = made
        made._places = self._places
        for key in keys:
            self._places.setdefault(key, []).append(made)
        return made

    def where(self, key: Key) -> int | None:
        """The depth at which a push was added; None when it is not in here."""
        for place in self._places.get(key, ()):
            if place.leads_to(self):
                return place.depth
        return None

    def __contains__(self, key: Key) -> bool:
        return self.where(key) is not None

    def leads_to(self, other: Contents) -> bool:
        """Is everything in here in the other as well, because that was made from this?"""
        line, depth = other._line, other.depth
        while line is not self._line:
            parent = line.parent
            if parent is None:
                return False
            line, depth = parent._line, parent.depth
        return self.depth <= depth
