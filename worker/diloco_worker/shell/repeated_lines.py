"""Lines of the log that would come again and again."""

from __future__ import annotations

# The same sentence is not logged again within so many seconds, and so many are remembered for that.
REPEAT_S = 30.0
SENTENCES = 100


class RepeatedLines:
    """What has been logged lately, so that the same is not logged again and again."""

    def __init__(self) -> None:
        self._said_at: dict[str, float] = {}

    def is_due(self, text: str, now: float) -> bool:
        """Whether to log this sentence; it counts as logged then."""
        if now - self._said_at.get(text, -REPEAT_S) < REPEAT_S:
            return False
        self._said_at.pop(text, None)  # the latest comes last
        self._said_at[text] = now
        while len(self._said_at) > SENTENCES:
            del self._said_at[next(iter(self._said_at))]
        return True

    def __len__(self) -> int:
        return len(self._said_at)

    def __contains__(self, text: str) -> bool:
        return text in self._said_at
