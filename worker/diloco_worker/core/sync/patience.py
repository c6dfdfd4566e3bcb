"""How long training waits at a boundary, what ends the waiting, and when to say again that it waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diloco_worker.core.connection import Phase
from diloco_worker.core.sync.flights import Flight
from diloco_worker.core.sync.news import LinkState

# Seconds between two words about the same wait.
WORD_S = 30.0
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
    """How long to wait for what is in flight: until then, which is `limit` seconds in all.

    `hasty`: only for the chunks to be in.
    """

    until: float
    limit: float
    hasty: bool


def why_not_wait(
    link: LinkState, options: Options, flight: Flight | None, *, is_leaving: bool
) -> str | None:
    """Why a boundary waits no longer, as a part of a sentence; None while it does.

    Args:
        flight: the one that is waited for.
    """
    if link.asked_to_stop is not None and not is_leaving:
        return link.asked_to_stop
    if link.has_ended:
        return f"the link has ended ({link.last_error})"
    if link.is_over:
        return "the run is over"
    if link.is_restarting and not is_leaving:
        return "the broker restarts"
    if link.phase is Phase.REFUSED:
        return f"the broker refuses this worker ({link.refusal})"
    if link.silence is not None and link.silence >= options.timeout:
        return f"no sign of life from {link.address} for {link.silence:.0f} s"
    if flight is not None and not flight.let_go:
        broken = link.reconnections - flight.reconnections
        if broken > options.max_sync_retries:
            return f"the connection broke {broken} times at this boundary"
    return None


def may_lack_chunks(link: LinkState, flight: Flight) -> bool:
    """Whether the broker may lack chunks of this flight that it takes now.

    Of one that is put off nothing is taken before its round, which may be waiting for this worker. A
    broker that goes away may give up the round in which the chunks are.
    """
    return link.is_restarting or flight.push_id not in link.uploaded | link.put_off


class Patience:
    """One wait. The first word comes after `first` seconds, the others every `WORD_S`."""

    def __init__(self, clock: Callable[[], float], first: float = WORD_S) -> None:
        self._clock = clock
        self._say_at = clock() + first

    def pause(self, at_most: float = WORD_S) -> float:
        """Seconds to sleep until the next word is due."""
        return max(0.0, min(at_most, self._say_at - self._clock()))

    def is_due(self) -> bool:
        """Whether it is time for a word; if so, the next one is due later."""
        is_due = self._clock() >= self._say_at
        if is_due:
            self._say_at = self._clock() + WORD_S
        return is_due
