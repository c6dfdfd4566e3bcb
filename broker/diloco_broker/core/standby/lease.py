"""The lease of a hub that has a standby: only while it holds may a version be released.

So two brokers never both release versions of a run. The hub sends stamps, and counts from the moment of
the stamp, so that no time on the way makes the lease longer:

- A *promise*: the standby returns the stamp, and does not take over for `seconds` from when it had it.
- *Votes*: a majority of the workers return it, and for `seconds` come to no other broker (`voters`). The
  standby takes over only with a majority as well, and two majorities have a worker in common.

A worker that has left a run which is over has voted for good: so a hub whose standby is gone keeps its
lease until the last of its workers has left, and ends.

Votes extend a lease without a gap. One that has lapsed begins again with a promise alone: the standby
may have taken over, and then makes none. So a hub that was replaced never releases anything again.

Others wait longer than `seconds` by `SAFETY`: clocks run at slightly different rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_broker.core.effects import Route
from diloco_broker.core.standby.voters import Voters

# By how much whoever gives a word waits longer than who relies on it. Clocks of machines differ by less
# than a tenth of a percent; simulations have 2 %, between the fastest and the slowest.
SAFETY = 1.05
# A hub without a lease for so many times its length lets nobody in, and sends its workers away: they may
# be wanted where the run goes on. Shorter gaps pass unnoticed.
ALONE_FOR_LEASES = 2.0


@dataclass
class Lease:
    """See the head of this module.

    Args:
        seconds: how long a word holds.
        draw: returns an unpredictable number below 2**64.
        term: how often the run's hub was replaced.
        standby: which standby it has; empty before the first has come.
    """

    seconds: float
    draw: Callable[[], int]
    # Of the event at hand, seconds of the machine's clock: that goes on while the broker stands still.
    now: float = 0.0
    standby: str = ""
    life: int | None = None  # of the standby's process
    ends_at: float = -math.inf
    heard_at: float = -math.inf  # when the standby was last heard
    promised_at: float = -math.inf  # the latest stamp that came with a promise
    is_alone: bool = False  # an operator has said that there is no standby any more
    superseded_by: int | None = None  # the term of the hub that has taken over
    voters: Voters = field(default_factory=Voters)
    _stamps: dict[int, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        if self.superseded_by is not None:
            return False
        return self.is_alone or self.now < self.ends_at

    @property
    def lapsed_s(self) -> float:
        """For how long it has not held; 0 while it does, infinite where it never has."""
        return 0.0 if self.holds else max(0.0, self.now - self.ends_at)

    def stamp(self) -> int:
        """A new stamp. Older ones are worth nothing once they are older than the lease is long."""
        now = self.now
        self._stamps = {s: at for s, at in self._stamps.items() if now - at < self.seconds}
        stamp = self.draw()
        self._stamps[stamp] = now
        return stamp

    def begins_with(self, standby: str, life: int) -> bool:
        """A standby says who it is. False for another one than this hub has.

        One that was started again has no list of voters, and keeps what it promised before.
        """
        if self.standby and standby != self.standby:
            return False
        self.standby, self.is_alone = standby, False
        if life != self.life:
            self.life = life
            self.voters.forget()
        return True

    def goes_on_alone(self) -> None:
        """An operator has said that there is no standby any more."""
        self.is_alone, self.standby, self.life = True, "", None
        self.voters.forget()

    def promised(self, stamp: int) -> None:
        """The standby has returned a stamp with a promise."""
        at = self._stamps.get(stamp)
        if at is not None:
            self.promised_at = max(self.promised_at, at)
            self.ends_at = max(self.ends_at, at + self.seconds)

    def voted(self, voter: int, stamp: int) -> None:
        """A worker has returned a stamp."""
        at = self._stamps.get(stamp)
        if at is None:
            return
        self._supports(voter, at)

    def left(self, voter: int) -> None:
        """A worker has left a run that is over: it never comes to another broker."""
        self._supports(voter, math.inf)

    def _supports(self, voter: int, at: float) -> None:
        """A voter comes to no other broker for `seconds` from `at` on."""
        self.voters.voted(voter, at)
        if self.now < self.ends_at:
            self.ends_at = max(self.ends_at, self.voters.supported_at + self.seconds)


@dataclass
class Watch:
    """Where a hub stands with its standby. Times are the machine's clock.

    Attributes:
        route: the standby's connection; None before it has come.
        speaks_at, polls_at: when the standby, and workers, are sent the next stamp.
        wants: what the standby said last.
        was_held: whether the lease held when it was last looked at.
        saves: the round before which a checkpoint was asked for, since the standby is to take over.
        has_sent_away: workers have been sent away since it lapsed.
    """

    lease: Lease
    route: Route | None = None
    speaks_at: float = -math.inf
    polls_at: float = -math.inf
    wants: str = ""
    was_held: bool = False
    saves: int | None = None
    has_sent_away: bool = False

    @property
    def lets_in(self) -> bool:
        """Whether workers are let in, and stay."""
        lease = self.lease
        return lease.superseded_by is None and lease.lapsed_s < ALONE_FOR_LEASES * lease.seconds

    @property
    def is_on_hold(self) -> bool:
        """The standby is about to take over, and is heard."""
        return self.wants == "hold" and self.hears_standby

    @property
    def hears_standby(self) -> bool:
        """The standby has said something within the length of a lease."""
        lease = self.lease
        return bool(lease.standby) and lease.now - lease.heard_at < lease.seconds
