"""What an operator has told all workers to do, and who has done it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Order:
    """`save_all` or `stop_all`. Workers that come while it is pending get it, too."""

    number: int
    text: str  # what the workers are told
    until: float  # when those that have not answered are not waited for any longer
    waiting: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)

    def settle(self, worker_id: str, *, is_gone: bool) -> None:
        """A worker has done it, or is gone."""
        self.waiting.discard(worker_id)
        (self.left if is_gone else self.saved).add(worker_id)
