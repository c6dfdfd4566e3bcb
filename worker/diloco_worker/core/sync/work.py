"""What was done for each fragment since its last freeze: steps, tokens, samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Totals:
    """What the script has reported up to now: sums, and the latest loss."""

    tokens: int = 0
    samples: int = 0
    loss: float | None = None


@dataclass(frozen=True)
class Work:
    """What a delta was made of: since the fragment's last freeze, and the latest loss."""

    steps: int = 0
    tokens: int = 0
    samples: int = 0
    loss: float | None = None


class WorkCounter:
    """See the head of this module.

    Args:
        step: optimizer steps so far.
        totals: what was reported with them.
        done: of each fragment, what has been done since its last freeze.

    Attributes:
        totals: as of the latest look at the reports.
    """

    def __init__(self, step: int, totals: Totals, done: Sequence[Work]) -> None:
        self.totals = totals
        # Of each fragment, steps and totals at its last freeze.
        self._since = [
            (step - work.steps, totals.tokens - work.tokens, totals.samples - work.samples)
            for work in done
        ]

    def since(self, fragment: int, step: int) -> Work:
        """What was done since the fragment's last freeze, and the latest loss."""
        then, tokens, samples = self._since[fragment]
        totals = self.totals
        return Work(step - then, totals.tokens - tokens, totals.samples - samples, totals.loss)

    def restart(self, fragment: int, step: int) -> None:
        """From here on it counts anew."""
        self._since[fragment] = (step, self.totals.tokens, self.totals.samples)
