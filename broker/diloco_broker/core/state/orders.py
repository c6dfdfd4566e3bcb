"""What an operator has told all workers to do, and who has done it."""

from __future__ import annotations

from dataclasses import dataclass, field

# Names of workers that have answered; more are not noted, so that those who come and go cost nothing.
MOST_NAMES = 1000


@dataclass
class Order:
    """`save_all` or `stop_all`. Workers that come while it is pending get it, too."""

    number: int
    text: str  # what the workers are told
    until: float  # when those that have not answered are not waited for any longer
    is_given_up: bool = False
    waiting: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)

    @property
    def is_pending(self) -> bool:
        """Does it concern workers that come now?"""
        return bool(self.waiting) and not self.is_given_up

    def settle(self, worker_id: str, *, is_gone: bool) -> None:
        """A worker has done it, or is gone."""
        self.waiting.discard(worker_id)
        answered = self.left if is_gone else self.saved
        if len(answered) < MOST_NAMES:
            answered.add(worker_id)
