"""Decide whether the open round closes, and why not.

`decide` is the only place that decides it. The machine calls it after every event until nothing changes,
and every display shows its answer. In asynchronous mode a round is the next update: it closes
`--grace` seconds after its first push became complete.

Its inputs are named tuples, five times cheaper to make than frozen dataclasses: they are made after
every event.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Reason(str, Enum):
    """Why no round closes now."""

    STOPPING = "stopping"  # the broker is stopping
    OVER = "over"  # the run is over
    PAUSED = "paused"  # an operator has paused the run
    LEASE = "lease"  # a hub with a standby lacks its lease
    TAKEOVER = "takeover"  # the standby is about to take over
    PARAMETERS = "parameters"  # the broker has no parameters yet
    CLOSING = "closing"  # the round is closing: its outer step is being taken
    WORKERS = "workers"  # even the pushes of all workers would be too few
    PUSHES = "pushes"  # pushes are missing
    GRACE = "grace"  # enough pushes are complete; the grace period for others is not over


@dataclass(frozen=True)
class Why:
    """Why the round stays open. The mode's `missing` tells displays whose pushes are missing.

    Attributes:
        needed: the least number of pushes, or of workers, still missing.
        since: when this became the reason (run time).
        until: when the wait times out (run time); None if only an event ends it.
    """

    reason: Reason
    needed: int = 0
    since: float = 0.0
    until: float | None = None


class Tally(NamedTuple):
    """The contributions of an open round, as numbers: they are counted after every event.

    Attributes:
        here: the number of workers whose push would be part of its version.
        is_complete: the round waits for no other worker. Always False in asynchronous mode.
        may_come: the number of workers that could contribute: the expected ones, including those whose
            push was refused, and those whose push is in progress or complete, even if they have left.
            In asynchronous mode all workers.
        enough_at: when the grace period began (run time): the quorum was reached, in asynchronous mode
            the first push was complete. None before that, and in rounds without a quorum.
    """

    here: int
    is_complete: bool
    may_come: int
    enough_at: float | None = None


class Limits(NamedTuple):
    """The conditions of the open round besides its pushes.

    Attributes:
        held: why no round may close at all; None if one may.
        held_until: when that times out (run time); None if only an event ends it.
        floor: the least number of contributions.
        grace_s: length of the grace period, in which the pushes of other workers still count.
    """

    held: Reason | None = None
    floor: int = 1
    grace_s: float = 0.0
    held_until: float | None = None


@dataclass(frozen=True)
class Decision:
    """The round closes exactly when `why` is None."""

    why: Why | None

    @property
    def closes(self) -> bool:
        return self.why is None

    def after(self, before: Decision) -> Decision:
        """Keep the start time of `before` if its reason was the same."""
        why, was = self.why, before.why
        if why is None or was is None or why.reason is not was.reason:
            return self
        is_same = (why.needed, why.until) == (was.needed, was.until)
        return before if is_same else Decision(Why(why.reason, why.needed, was.since, why.until))


def decide(tally: Tally | None, limits: Limits, now: float) -> Decision:
    """Decide whether the open round closes now (run time). No tally: no round is open."""
    return Decision(_why_not(tally, limits, now))


def _why_not(tally: Tally | None, limits: Limits, now: float) -> Why | None:
    if tally is None or limits.held not in (None, Reason.PAUSED):
        return Why(limits.held or Reason.PARAMETERS, since=now, until=limits.held_until)
    needed = max(1, limits.floor) - tally.here
    if needed > 0 and tally.may_come < limits.floor:
        # Also in a paused run: the pause is the state of the run, and the lack shows only here.
        return Why(Reason.WORKERS, needed, since=now)
    if limits.held is not None:
        return Why(limits.held, since=now)
    if needed > 0:
        return Why(Reason.PUSHES, needed, since=now)
    if tally.is_complete:
        return None
    if tally.enough_at is None:
        return Why(Reason.PUSHES, since=now)
    until = tally.enough_at + limits.grace_s
    return Why(Reason.GRACE, since=tally.enough_at, until=until) if now < until else None
