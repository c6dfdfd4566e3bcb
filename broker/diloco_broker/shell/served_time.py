"""The broker's clock: seconds during which it served.

A process that is stopped (SIGSTOP, a debugger, a machine that sleeps or is overloaded) receives nothing.
When it runs again, what its workers have sent waits in the sockets, and every one of them looks silent
for as long as it stood still itself. So all deadlines run on a clock that leaves such time out.
"""

from __future__ import annotations

from collections.abc import Callable

from diloco_broker.core.events import Now

# After more than this between two looks at the clock the broker stood still: a turn of the loop takes
# milliseconds and waits for a tenth of a second at most. So much of it counts.
LONGEST_S = 0.5
COUNTED_S = 0.1
# From so much on it is said, and workers get time to come back: their connections may have broken. They
# give up a broker that is silent for 10 s, no earlier.
WORTH_SAYING_S = 5.0


class ServedTime:
    """See the head of this module. A call returns seconds, like any monotonic clock.

    Args:
        clock: of the machine, in seconds; it should go on while the machine sleeps.
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
        """This clock and that of the machine, at the same moment."""
        served = self()
        return Now(served, self._looked_at)

    def stood_still(self) -> float:
        """Seconds that were left out since this was asked last; 0 where they are not worth saying."""
        unsaid, self._unsaid = self._unsaid, 0.0
        return unsaid
