"""The lease of a hub that has a standby: it may release versions only while it holds the lease. Pure.

So two brokers never both release versions of a run. Each of them asks with a *nonce* and counts from the
moment it drew that nonce, so network delays never extend a promise or a vote:

- A *promise*: the standby returns a nonce and does not take over for `seconds` after it received it.
- *Votes*: a majority of the workers return a nonce and vote for no other broker for `seconds`. They
  extend the lease of the hub, or let the standby take over: two majorities share a worker.

A worker that leaves a finished run votes for its hub permanently, so a hub without a standby keeps its
lease until its last worker has left, and ends.

Votes only extend a lease that holds. A lapsed lease needs a promise to begin again: the standby may have
taken over, and then it makes none. So a hub that was replaced never releases anything again.

The promising side waits longer than `seconds`, by the factor `SAFETY`, since clock rates differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_broker.core.effects import Route

# Clocks of machines differ by less than a tenth of a percent; simulations have 2 %, between the fastest
# and the slowest.
SAFETY = 1.05
# In lease lengths: how long after its lease lapsed a hub stops admitting workers and sends its own away,
# so that they can look for the broker that has the run. Workers do not notice shorter gaps.
ALONE_FOR_LEASES = 2.0


def majority(voters: int) -> int:
    """The smallest number that is more than half; at least 1."""
    return voters // 2 + 1


@dataclass
class Ballot:
    """The votes for one of the two brokers, and the voter set: the members of the run at the hub.

    A voter is one incarnation of a worker's process, named by a random number. The hub proposes a voter
    set to its standby, which has confirmed it when it returns a nonce that was drawn after the proposal.
    Until then the standby may count either set, so the hub needs a majority of both: two brokers that
    count different sets could both find a majority.
    """

    draw: Callable[[], int]  # returns an unpredictable number below 2**64
    seconds: float  # how long a vote holds
    voters: frozenset[int] = frozenset()  # confirmed by the standby; empty before the first
    proposed: frozenset[int] = frozenset()  # sent to it since, unconfirmed; empty: none
    _proposals: int = 0  # their number so far
    # When each nonce was drawn, and how many proposals there had been.
    _drawn: dict[int, tuple[float, int]] = field(default_factory=dict)
    # By voter, when the latest nonce that it returned was drawn.
    _voted_at: dict[int, float] = field(default_factory=dict)

    def nonce(self, now: float) -> int:
        """Draw a nonce. Nonces expire when a vote for them would have."""
        self._drawn = {n: d for n, d in self._drawn.items() if now - d[0] < self.seconds}
        nonce = self.draw()
        self._drawn[nonce] = now, self._proposals
        return nonce

    def drawn_at(self, nonce: int) -> float | None:
        """When a nonce was drawn; None if it is not ours or has expired."""
        return self._drawn[nonce][0] if nonce in self._drawn else None

    def propose(self, voters: frozenset[int]) -> None:
        """Propose the members of now. One proposal at a time: the standby may have received it.

        An empty set is never proposed: a hub that was just restarted would take the voter set away with
        which the standby can replace it. An older set is safe, since both need a majority of it.
        """
        if voters and not self.proposed and voters != self.voters:
            self.proposed = voters
            self._proposals += 1

    def has_come(self, nonce: int) -> None:
        """The standby returned a nonce, so it has the set that was proposed before that was drawn."""
        if self.proposed and nonce in self._drawn and self._drawn[nonce][1] == self._proposals:
            self.voters, self.proposed = self.proposed, frozenset()
            self._voted_at = {v: at for v, at in self._voted_at.items() if v in self.voters}

    def forget(self) -> None:
        """The standby was restarted and has no voter set."""
        self.voters = self.proposed = frozenset()

    def vote(self, voter: int, at: float) -> None:
        """A voter returned a nonce that was drawn at this time."""
        if voter in self.voters or voter in self.proposed:
            self._voted_at[voter] = max(at, self._voted_at.get(voter, -math.inf))

    @property
    def supported_at(self) -> float:
        """The latest time since which a majority has returned nonces, in each set that counts."""
        sets = [self.voters, self.proposed] if self.proposed else [self.voters]
        return min(map(self._supported_at, sets)) if self.voters else -math.inf

    def _supported_at(self, voters: frozenset[int]) -> float:
        times = sorted((self._voted_at.get(voter, -math.inf) for voter in voters), reverse=True)
        return times[majority(len(times)) - 1]

    def votes_since(self, at: float) -> int:
        """The number of voters that returned a nonce drawn at this time or later."""
        return sum(self._voted_at.get(voter, -math.inf) >= at for voter in self.voters)


@dataclass
class Lease:
    """The hub's side. Times are of the machine's clock, which runs on while the process is suspended."""

    ballot: Ballot  # its workers' votes; it also draws the nonces for the standby
    now: float = 0.0  # of the current event
    standby: str = ""  # the standby's name; empty before the first has connected
    incarnation: int | None = None  # the incarnation of its process
    route: Route | None = None
    heard_at: float = -math.inf
    promised_at: float = -math.inf  # the latest nonce that came with a promise
    wants: str = ""  # from its last message
    ends_at: float = -math.inf
    is_alone: bool = False  # an operator declared the standby gone
    superseded_by: int | None = None  # the term of the hub that has taken over
    was_held: bool = False  # at the last tick
    speaks_at: float = -math.inf  # when the next nonce goes to the standby
    polls_at: float = -math.inf  # when the next one goes to the workers
    saves: int | None = None  # the round before which a checkpoint was requested for a takeover

    @property
    def seconds(self) -> float:
        """How long a promise or a vote holds."""
        return self.ballot.seconds

    @property
    def holds(self) -> bool:
        return self.superseded_by is None and (self.is_alone or self.now < self.ends_at)

    @property
    def lets_in(self) -> bool:
        """Whether workers are admitted and may stay."""
        is_short = self.now - self.ends_at < ALONE_FOR_LEASES * self.seconds
        return self.superseded_by is None and (self.holds or is_short)

    @property
    def hears_standby(self) -> bool:
        """The standby sent a message within the last lease length."""
        return bool(self.standby) and self.now - self.heard_at < self.seconds

    @property
    def is_on_hold(self) -> bool:
        """The standby is connected and about to take over."""
        return self.wants == "hold" and self.hears_standby

    def begins_with(self, standby: str, incarnation: int) -> bool:
        """A standby named itself. Returns False if this hub has another one.

        A restarted standby has no voter set, and its earlier promises still hold.
        """
        if self.standby and standby != self.standby:
            return False
        self.standby, self.is_alone, self.heard_at = standby, False, self.now
        if incarnation != self.incarnation:
            self.incarnation = incarnation
            self.ballot.forget()
        return True

    def goes_on_alone(self) -> None:
        """An operator declared the standby gone."""
        self.is_alone, self.standby, self.incarnation = True, "", None
        self.ballot.forget()

    def promised(self, nonce: int) -> None:
        """The standby returned a nonce with a promise."""
        at = self.ballot.drawn_at(nonce)
        if at is not None:
            self.ballot.has_come(nonce)
            self.promised_at = max(self.promised_at, at)
            self.ends_at = max(self.ends_at, at + self.seconds)

    def voted(self, voter: int, nonce: int) -> None:
        """A worker returned a nonce."""
        at = self.ballot.drawn_at(nonce)
        if at is not None:
            self._supports(voter, at)

    def left(self, voter: int) -> None:
        """A worker left a finished run: it never votes for another broker."""
        self._supports(voter, math.inf)

    def _supports(self, voter: int, at: float) -> None:
        """A voter votes for no other broker until `seconds` after `at`."""
        self.ballot.vote(voter, at)
        if self.now < self.ends_at:
            self.ends_at = max(self.ends_at, self.ballot.supported_at + self.seconds)
