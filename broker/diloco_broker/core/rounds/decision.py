"""When a round closes, and what it waits for until then.

`decide` is the only place that says so. The machine asks it after every event until nothing changes, and
whatever shows people why a run waits shows its answer. In asynchronous mode a round is the next update:
it closes with the push that has been whole longest, `--grace` seconds after that became whole.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from enum import Enum


class Reason(str, Enum):
    """Why no round closes now."""

    STOPPING = "stopping"  # the broker stops
    OVER = "over"  # the run is over
    PAUSED = "paused"  # an operator has paused it
    LEASE = "lease"  # a hub with a standby lacks its lease
    TAKEOVER = "takeover"  # the standby is about to take over
    PARAMETERS = "parameters"  # there are none yet
    CLOSING = "closing"  # the round is closing: its outer step is being taken
    PARENT = "parent"  # the site's last mean of the fragment is not in a version of the parent's
    WORKERS = "workers"  # even the pushes of all workers would be too few
    PUSHES = "pushes"  # pushes are missing
    GRACE = "grace"  # enough pushes are here, and others have some time left


@dataclass(frozen=True)
class Why:
    """A reason, with its particulars.

    Attributes:
        workers: whose pushes are missing, in the order of names.
        needed: pushes, or workers, that are missing at least.
        since: from when on this has been the reason (run time).
        until: when the wait ends at the latest (run time); None where only an event ends it.
    """

    reason: Reason
    workers: tuple[str, ...] = ()
    needed: int = 0
    since: float = 0.0
    until: float | None = None


@dataclass(frozen=True)
class Tally:
    """What an open round has.

    Attributes:
        here: workers of whom a push would be in its version.
        missing: other workers that it waits for.
        is_complete: nobody else is waited for. Never in asynchronous mode, where nobody knows who comes.
        may_come: how many workers could be in it: those it waits for, refused ones among them, and those
            whose push is in progress or whole, though they may have left. In asynchronous mode all.
        enough_at: since when it has as many pushes as a quorum asks for (run time); None before, and
            where only those of all workers are enough.
    """

    here: Set[str]
    missing: Set[str]
    is_complete: bool
    may_come: int
    enough_at: float | None = None


@dataclass(frozen=True)
class Limits:
    """What holds for the open round besides its pushes.

    Attributes:
        held: why none closes, whatever it has.
        floor: workers that it needs at least.
        grace_s: seconds that others have once enough pushes are here.
    """

    held: Reason | None = None
    floor: int = 1
    grace_s: float = 0.0


@dataclass(frozen=True)
class Decision:
    """`why` not, if it does not close."""

    why: Why | None

    @property
    def closes(self) -> bool:
        return self.why is None

    def after(self, before: Decision) -> Decision:
        """The same, where the decision before it had the same reason perhaps, for some time."""
        if self.why is None or before.why is None or self.why.reason is not before.why.reason:
            return self
        return Decision(replace(self.why, since=before.why.since))


def decide(tally: Tally | None, limits: Limits, now: float) -> Decision:
    """Whether the open round closes at this moment (run time). Without a tally none is open."""
    return Decision(_why_not(tally, limits, now))


def _why_not(tally: Tally | None, limits: Limits, now: float) -> Why | None:
    if limits.held is not None:
        return Why(limits.held, since=now)
    if tally is None:
        return Why(Reason.PARAMETERS, since=now)
    needed, missing = max(1, limits.floor) - len(tally.here), tuple(sorted(tally.missing))
    if needed > 0:
        reason = Reason.WORKERS if tally.may_come < limits.floor else Reason.PUSHES
        return Why(reason, missing, needed, since=now)
    if tally.is_complete:
        return None
    if tally.enough_at is None:
        return Why(Reason.PUSHES, missing, since=now)
    until = tally.enough_at + limits.grace_s
    return Why(Reason.GRACE, missing, since=tally.enough_at, until=until) if now < until else None
