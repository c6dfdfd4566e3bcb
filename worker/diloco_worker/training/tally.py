"""What was done for each fragment since its last freeze: steps, tokens, samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco_worker.training.fragment_sync import Work
from diloco_worker.training.reports import Reports


@dataclass(frozen=True)
class Mark:
    """The totals at a fragment's last freeze."""

    step: int
    tokens: int
    samples: int


class Tally:
    """See the head of this module.

    Args:
        reports: has the totals of tokens and samples.
        step: optimizer steps so far.
        done: of each fragment, what has been done before.
    """

    def __init__(self, reports: Reports, step: int, done: Sequence[Work]) -> None:
        self._reports = reports
        self._marks = [
            Mark(step - work.steps, reports.tokens - work.tokens, reports.samples - work.samples)
            for work in done
        ]

    def since(self, fragment: int, step: int) -> Work:
        """What was done since the fragment's last freeze, and the latest loss."""
        mark, reports = self._marks[fragment], self._reports
        return Work(
            step - mark.step,
            reports.tokens - mark.tokens,
            reports.samples - mark.samples,
            reports.loss,
        )

    def restart(self, fragment: int, step: int) -> None:
        """From here on it counts anew."""
        self._marks[fragment] = Mark(step, self._reports.tokens, self._reports.samples)
