"""How long training waits at a boundary, and when to log again that it waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Seconds between two log lines about the same wait.
LOG_INTERVAL_S = 30.0
# Seconds that a process which has been told to end gives its pushes to get out.
HASTY_S = 4.0


@dataclass(frozen=True)
class Options:
    """What a worker may have of its own; `DiLoCoWorker` says what each of them means."""

    sync_every: int | None = None
    dylu: bool | None = None
    wire_dtype: str | None = None
    heartbeat_interval: float | None = None
    max_sync_retries: int = 3
    timeout: float = 600.0


@dataclass(frozen=True)
class Leaving:
    """How long to wait for what is in flight."""

    until: float
    limit: float  # seconds in all
    hasty: bool  # only for the chunks to be in


class Patience:
    """One wait. The first log line is due after `first` seconds, the others every `LOG_INTERVAL_S`."""

    def __init__(self, clock: Callable[[], float], first: float = LOG_INTERVAL_S) -> None:
        self._clock = clock
        self._say_at = clock() + first

    def pause(self, at_most: float = LOG_INTERVAL_S) -> float:
        """Seconds to sleep until the next log line is due."""
        return max(0.0, min(at_most, self._say_at - self._clock()))

    def is_due(self) -> bool:
        """Whether it is time for a log line; if so, the next one is due later."""
        is_due = self._clock() >= self._say_at
        if is_due:
            self._say_at = self._clock() + LOG_INTERVAL_S
        return is_due
