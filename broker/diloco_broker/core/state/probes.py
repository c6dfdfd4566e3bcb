"""How often the way to this broker may be measured, by all together."""

from __future__ import annotations

from dataclasses import dataclass

# Probes at once, with at most 48 KiB each way: five workers look at the same time, with 24 MiB each way.
# And how many more in a second: what somebody who goes on and on takes of a line, 3 MiB/s.
AT_ONCE = 6000
A_SECOND = 64.0


@dataclass
class ProbeAllowance:
    """What is left of it. Times are seconds of the core's clock."""

    left: float = AT_ONCE
    seen_at: float = 0.0

    def take(self, now: float) -> bool:
        """Take one probe's share; False where there is none."""
        left = min(AT_ONCE, self.left + max(0.0, now - self.seen_at) * A_SECOND)
        if left < 1:
            return False
        self.left, self.seen_at = left - 1, now
        return True
