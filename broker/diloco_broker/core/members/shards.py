"""Which share of the data each worker has that samples for itself: slot `index` of `count`.

A worker keeps its slot when it goes away, since it may come back. A newcomer takes the lowest slot that
nobody has had. Where all that are planned for are taken, it takes that of whoever has been away
longest, and a new one only while everybody is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Shards:
    """See the head of this module. Only the methods here change it."""

    owners: list[str] = field(default_factory=list)  # by slot, ids of workers
    absent: list[str] = field(default_factory=list)  # of these, those away, the longest first

    def restore(self, owners: Sequence[str]) -> None:
        """What a checkpoint has: nobody is here yet."""
        self.owners, self.absent = list(owners), list(owners)

    def slot(self, worker_id: str, planned: int) -> tuple[int, int]:
        """Index and count for a worker that joins, in a run planned for so many."""
        if worker_id in self.absent:
            self.absent.remove(worker_id)
        if worker_id not in self.owners:
            if len(self.owners) >= planned and self.absent:
                self.owners[self.owners.index(self.absent.pop(0))] = worker_id
            else:
                self.owners.append(worker_id)
        return self.owners.index(worker_id), max(planned, len(self.owners))

    def leave(self, worker_id: str) -> None:
        if worker_id in self.owners and worker_id not in self.absent:
            self.absent.append(worker_id)
