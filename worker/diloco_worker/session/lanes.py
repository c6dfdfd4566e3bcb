"""The connections for chunks of a worker that is a group of processes: each moves those it owns. Pure.

Lane i is that of process i, lane 0 the bulk connection of the one that has the session. A worker that is
no group has lane 0 alone, which owns all from the start. A group shares its chunks out first, also a
group of one process.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_protocol import Bitmap, messages

# By fragment, the frozen one included, the process that owns each chunk.
Owners = tuple[tuple[int, ...], ...]


@dataclass
class Lanes:
    """See the head of this module."""

    count: int = 1
    is_group: bool = False
    owners: Owners | None = None  # None unless it is a group, and until its chunks are shared out

    @property
    def are_known(self) -> bool:
        return not self.is_group or self.owners is not None

    def of(self, fragment: int, index: int) -> int:
        """The lane of a chunk."""
        return 0 if self.owners is None else self.owners[fragment][index]

    def bindings(self, session: bytes, credit: int) -> tuple[messages.Lane, ...]:
        """The first word on each lane, in order."""
        assert self.owners is not None
        return tuple(
            messages.Lane(session, lane, tuple(_share(each, lane) for each in self.owners), credit)
            for lane in range(self.count)
        )


def _share(owners: tuple[int, ...], lane: int) -> bytes:
    bitmap = Bitmap(len(owners))
    for index, owner in enumerate(owners):
        if owner == lane:
            bitmap.add(index)
    return bitmap.to_bytes()
