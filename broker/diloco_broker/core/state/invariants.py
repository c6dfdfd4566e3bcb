"""What is raised when something does not hold that must between two events."""

from __future__ import annotations


class InvariantBroken(AssertionError):
    """The state of the core is not what it must be.

    Attributes:
        worker_id: whose part of it; empty where it is not one worker's.
    """

    def __init__(self, text: str, worker_id: str = "") -> None:
        super().__init__(text)
        self.worker_id = worker_id
