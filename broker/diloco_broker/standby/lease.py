"""The lease of a hub that has a standby: only while it holds may a version be released. Pure.

So two brokers never both release versions of a run. Each asks with a *nonce*, and counts from the moment
at which it drew that, so that no time on the way makes a word hold longer:

- A *promise*: the standby returns a nonce, and does not take over for `seconds` from when it had it.
- *Votes*: a majority of the workers return a nonce, and for `seconds` vote for no other broker. They
  extend the lease of the hub, or let the standby take over: two majorities have a worker in common.

A worker that has left a run which is over has voted for good: so a hub whose standby is gone keeps its
lease until the last of its workers has left, and ends.

Votes extend a lease without a gap. One that has lapsed begins again with a promise alone: the standby
may have taken over, and then makes none. So a hub that was replaced never releases anything again.

Who gives a word keeps it longer than `seconds`, by `SAFETY`: clocks run at slightly different rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_broker.core.effects import Route

# Clocks of machines differ by less than a tenth of a percent; simulations have 2 %, between the fastest
# and the slowest.
SAFETY = 1.05
# A hub without a lease for so many times its length lets nobody in, and sends its workers away: they may
# be wanted where the run goes on. Shorter gaps pass unnoticed.
ALONE_FOR_LEASES = 2.0


def majority(voters: int) -> int:
    """The least number that is more than half; one at least."""
    return voters // 2 + 1


@dataclass
class Ballot:
    """The votes for one of the two brokers, and who has one: the members of the run at the hub.

    A voter is one incarnation of a worker's process, by a random number. The hub sends its standby who
    they are, and knows that it has them when it returns a nonce that was drawn since. Until then it may
    count in either set, so the hub needs a majority of both: two brokers that count in different sets
    could both find one.
    """

    draw: Callable[[], int]  # returns an unpredictable number below 2**64
    seconds: float  # for how long a vote is a word
    voters: frozenset[int] = frozenset()  # those that the standby has; empty before it has any
    proposed: frozenset[int] = frozenset()  # those that it was sent since, and may have or not
    _proposals: int = 0  # so many there have been
    # When each nonce was drawn, and how many proposals there had been.
    _drawn: dict[int, tuple[float, int]] = field(default_factory=dict)
    # By voter, when the latest nonce that it returned was drawn.
    _voted_at: dict[int, float] = field(default_factory=dict)

    def nonce(self, now: float) -> int:
        """A new one. Older ones are worth nothing once they are older than a vote holds."""
        self._drawn = {n: d for n, d in self._drawn.items() if now - d[0] < self.seconds}
        nonce = self.draw()
        self._drawn[nonce] = now, self._proposals
        return nonce

    def drawn_at(self, nonce: int) -> float | None:
        """None for a nonce that is not ours, or too old."""
        return self._drawn[nonce][0] if nonce in self._drawn else None

    def propose(self, voters: frozenset[int]) -> None:
        """These are here now. One proposal at a time: the standby may have each that it was sent.

        Nobody is no proposal: a hub that was started again would take from its standby the set with
        which that can replace it. An older set is safe, since each needs a majority of it.
        """
        if voters and not self.proposed and voters != self.voters:
            self.proposed = voters
            self._proposals += 1

    def has_come(self, nonce: int) -> None:
        """The standby returns a nonce: it has what had been proposed until then."""
        if self.proposed and nonce in self._drawn and self._drawn[nonce][1] == self._proposals:
            self.voters, self.proposed = self.proposed, frozenset()
            self._voted_at = {v: at for v, at in self._voted_at.items() if v in self.voters}

    def forget(self) -> None:
        """The standby was started again, and knows of no voters."""
        self.voters = self.proposed = frozenset()

    def vote(self, voter: int, at: float) -> None:
        """A voter has returned a nonce that was drawn at that time."""
        if voter in self.voters or voter in self.proposed:
            self._voted_at[voter] = max(at, self._voted_at.get(voter, -math.inf))

    @property
    def supported_at(self) -> float:
        """The latest time of which a majority has returned nonces, in each set that counts."""
        sets = [self.voters, self.proposed] if self.proposed else [self.voters]
        return min(map(self._supported_at, sets)) if self.voters else -math.inf

    def _supported_at(self, voters: frozenset[int]) -> float:
        times = sorted((self._voted_at.get(voter, -math.inf) for voter in voters), reverse=True)
        return times[majority(len(times)) - 1]

    def votes_since(self, at: float) -> int:
        """How many voters have returned a nonce of that time or later."""
        return sum(self._voted_at.get(voter, -math.inf) >= at for voter in self.voters)


@dataclass
class Lease:
    """The hub's end. Times are of the machine's clock, which goes on while the broker stands still."""

    ballot: Ballot  # its workers' votes; it draws the nonces for the standby, too
    now: float = 0.0  # of the event at hand
    standby: str = ""  # which one it has; empty before the first has come
    life: int | None = None  # of its process
    route: Route | None = None
    heard_at: float = -math.inf
    promised_at: float = -math.inf  # the latest nonce that came with a promise
    wants: str = ""  # as it said last
    ends_at: float = -math.inf
    is_alone: bool = False  # an operator has said that there is no standby any more
    superseded_by: int | None = None  # the term of the hub that has taken over
    was_held: bool = False  # when it was last looked at
    speaks_at: float = -math.inf  # when the standby is sent the next nonce
    polls_at: float = -math.inf  # when the workers are
    saves: int | None = None  # the round before which the standby was to have a checkpoint

    @property
    def seconds(self) -> float:
        """How long a word holds."""
        return self.ballot.seconds

    @property
    def holds(self) -> bool:
        return self.superseded_by is None and (self.is_alone or self.now < self.ends_at)

    @property
    def lets_in(self) -> bool:
        """Whether workers are let in, and stay."""
        is_short = self.now - self.ends_at < ALONE_FOR_LEASES * self.seconds
        return self.superseded_by is None and (self.holds or is_short)

    @property
    def hears_standby(self) -> bool:
        """The standby has said something within the length of a lease."""
        return bool(self.standby) and self.now - self.heard_at < self.seconds

    @property
    def is_on_hold(self) -> bool:
        """The standby is about to take over, and is heard."""
        return self.wants == "hold" and self.hears_standby

    def begins_with(self, standby: str, life: int) -> bool:
        """A standby says who it is. False for another one than this hub has.

        One that was started again knows of no voters, and keeps what it promised before.
        """
        if self.standby and standby != self.standby:
            return False
        self.standby, self.is_alone, self.heard_at = standby, False, self.now
        if life != self.life:
            self.life = life
            self.ballot.forget()
        return True

    def goes_on_alone(self) -> None:
        """An operator has said that there is no standby any more."""
        self.is_alone, self.standby, self.life = True, "", None
        self.ballot.forget()

    def promised(self, nonce: int) -> None:
        """The standby has returned a nonce with a promise."""
        at = self.ballot.drawn_at(nonce)
        if at is not None:
            self.ballot.has_come(nonce)
            self.promised_at = max(self.promised_at, at)
            self.ends_at = max(self.ends_at, at + self.seconds)

    def voted(self, voter: int, nonce: int) -> None:
        """A worker has returned a nonce."""
        at = self.ballot.drawn_at(nonce)
        if at is not None:
            self._supports(voter, at)

    def left(self, voter: int) -> None:
        """A worker has left a run that is over: it never comes to another broker."""
        self._supports(voter, math.inf)

    def _supports(self, voter: int, at: float) -> None:
        """A voter comes to no other broker for `seconds` from `at` on."""
        self.ballot.vote(voter, at)
        if self.now < self.ends_at:
            self.ends_at = max(self.ends_at, self.ballot.supported_at + self.seconds)
