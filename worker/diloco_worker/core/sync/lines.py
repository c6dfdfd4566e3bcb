"""The worker's line in the log for each push that has counted; at a fast pace, for several at once."""

from __future__ import annotations

import math
from collections.abc import Callable

from diloco_worker.core.sync.flights import Flight
from diloco_worker.core.sync.news import Arrival

# Least seconds between two lines.
LINE_S = 1.0


class SyncLines:
    """See the head of this module.

    Args:
        has_rounds: whether rounds are common to all workers.
        has_fragments: whether the model is cut into several.
        clock: seconds, monotonic.
        waited: seconds that training has stood still so far.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        waited: float = 0.0,
        *,
        has_rounds: bool = True,
        has_fragments: bool = False,
    ) -> None:
        self._clock = clock
        self._has_rounds = has_rounds
        self._has_fragments = has_fragments
        self._said_at: float | None = None
        self._newest = ""
        self._unsaid = 0
        self._waited_before = waited

    def counted(self, flight: Flight, arrival: Arrival, staleness: int, step: int) -> None:
        """A push is in a version, and that in the model.

        Args:
            staleness: versions between its base and the one it went into.
            step: the optimizer step behind which it was merged.
        """
        made = [f"round {arrival.released.round}"] if self._has_rounds else []
        made += [f"fragment {flight.push.fragment}"] if self._has_fragments else []
        where = f" ({', '.join(made)})" if made else ""
        norm = "" if flight.push.norm is None else f", norm {flight.push.norm:.4g}"
        delay = step - flight.began
        after = f"{_steps(delay)} after the slot"
        merged = f", merged {after}" if self._has_fragments or delay else ""
        self._unsaid += 1
        self._newest = (
            f"version {arrival.version.counter}{where} has {_steps(flight.steps)} of this worker{norm}, "
            f"staleness {staleness}{merged}"
        )

    @property
    def due_in(self) -> float:
        """Seconds until `line` has something to say; infinite while there is nothing unsaid."""
        if not self._unsaid:
            return math.inf
        return 0.0 if self._said_at is None else max(0.0, self._said_at + LINE_S - self._clock())

    def line(self, waited: float, *, at_once: bool = False) -> str | None:
        """The line, if there is something to say and the last one was long enough ago.

        Args:
            waited: seconds that training has stood still so far.
            at_once: however short ago it was.
        """
        if not self._unsaid:
            return None
        now = self._clock()
        if not at_once and self._said_at is not None and now - self._said_at < LINE_S:
            return None
        waited_now, others = waited - self._waited_before, self._unsaid - 1
        more = f"; and {others} more since the last line" if others else ""
        self._said_at, self._unsaid, self._waited_before = now, 0, waited
        return f"Synchronised: {self._newest}; waited {waited_now:.1f} s{more}."


def _steps(number: int) -> str:
    return f"{number} step{'s'[: number != 1]}"
