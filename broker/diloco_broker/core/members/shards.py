"""Shards: each worker that samples for itself has share `index` of `count` of the data.

An absent worker keeps its share, since it may rejoin. A new worker gets the lowest unused share of the
planned number. If all are used, it gets the share of the worker that has been absent longest, and an
additional share if no worker is absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Shards:
    """The shares of all workers. Only the methods here change it."""

    owners: list[str] = field(default_factory=list)  # worker ids by share
    absent: list[str] = field(default_factory=list)  # absent ones, the longest absent first

    def restore(self, owners: Sequence[str]) -> None:
        """Continue from a checkpoint: all workers are absent."""
        self.owners, self.absent = list(owners), list(owners)

    def slot(self, worker_id: str, planned: int) -> tuple[int, int]:
        """Index and count for a worker that joins, in a run planned for `planned` workers."""
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
