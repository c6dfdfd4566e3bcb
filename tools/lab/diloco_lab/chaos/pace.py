"""How slow this machine is, and so how long things may take. Pure."""

from __future__ import annotations

from dataclasses import dataclass

CALM_ROUNDS = 3  # at the beginning of a run, before its first fault
# Seconds until these have closed on two idle cores: mostly five processes that start.
USUAL_S = 8.0
# Seconds that a mode may take there. It takes about 100, with its calm run.
MODE_S = 300.0


@dataclass(frozen=True)
class Pace:
    """By how much longer a run without faults takes than on two idle cores; never less than 1."""

    slowness: float = 1.0

    @classmethod
    def of(cls, calm_s: float) -> Pace:
        """Of a machine on which the calm beginning of a run took so many seconds."""
        return cls(max(1.0, calm_s / USUAL_S))

    def stretched(self, seconds: float) -> float:
        """A bound that fits two idle cores, for this machine."""
        return round(seconds * self.slowness, 2)

    @property
    def mode_s(self) -> float:
        """Seconds that one run of a mode may take."""
        return self.stretched(MODE_S)
