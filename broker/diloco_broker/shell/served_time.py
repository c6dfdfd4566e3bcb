"""The broker's clock: counts only the seconds during which it served.

A suspended process (SIGSTOP, a debugger, a machine that sleeps or is overloaded) receives nothing. When
it resumes, its workers' messages are still in the sockets, and every worker seems to have been silent
for the whole suspension. So all deadlines run on a clock that excludes such time.
"""

from __future__ import annotations

from collections.abc import Callable

from diloco_broker.core.events import Now

# Seconds between two readings above which the broker was suspended: a turn of the loop takes
# milliseconds and waits for 0.1 s at most. Of such a gap only COUNTED_S count.
LONGEST_S = 0.5
COUNTED_S = 0.1
# Seconds above which a suspension is logged and workers get time to reconnect: their connections may
# have broken. They give up on a broker after 10 s of silence, not earlier.
WORTH_SAYING_S = 5.0


class ServedTime:
    """A monotonic clock of served time. A call returns seconds.

    Args:
        clock: the machine's clock, in seconds; it should include time asleep.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looked_at = clock()
        self._left_out = 0.0
        self._unsaid = 0.0

    def __call__(self) -> float:
        reading = self._clock()
        gap, self._looked_at = reading - self._looked_at, reading
        lost = gap - COUNTED_S if gap > LONGEST_S else 0.0
        self._left_out += lost
        if lost >= WORTH_SAYING_S:
            self._unsaid += lost
        return reading - self._left_out

    def both(self) -> Now:
        """This clock and the machine's clock, read at the same moment."""
        served = self()
        return Now(served, self._looked_at)

    def stood_still(self) -> float:
        """Seconds excluded since the last call; 0 if below `WORTH_SAYING_S`."""
        unsaid, self._unsaid = self._unsaid, 0.0
        return unsaid
