"""Whose votes extend a lease: workers that the hub and its standby agree on.

A voter is one life of a worker's process, by a random number. The hub proposes who they are, the standby
says which proposal it has. Until it has the newest one it may know either, so a majority of both is
needed: two brokers that count in different lists could both find one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Roster:
    """A list of voters; `number` is random, and names it."""

    number: int
    voters: frozenset[int]


def majority(voters: int) -> int:
    """How many of so many are more than half; one at least."""
    return voters // 2 + 1


@dataclass
class Voters:
    """See the head of this module.

    Attributes:
        agreed: what the standby has said that it has; None before it has said so.
        proposed: what it has been sent since, and may have or not.
    """

    agreed: Roster | None = None
    proposed: Roster | None = None
    _voted_at: dict[int, float] = field(
        default_factory=dict
    )  # by voter: the latest stamp it returned

    @property
    def newest(self) -> Roster | None:
        return self.proposed or self.agreed

    def forget(self) -> None:
        """The standby was started again, and has no list."""
        self.agreed = self.proposed = None

    def propose(self, number: int, voters: frozenset[int]) -> None:
        """These are here now. One proposal at a time: the standby may have each that it was sent.

        Nobody is no list: a hub that was started again would take from its standby the one with which
        that can replace it. An older list is safe, since each needs a majority of it.
        """
        if (
            voters
            and self.proposed is None
            and (self.agreed is None or self.agreed.voters != voters)
        ):
            self.proposed = Roster(number, voters)

    def acknowledged(self, number: int) -> None:
        """The standby has the list of that number."""
        if self.proposed is not None and self.proposed.number == number:
            self.agreed, self.proposed = self.proposed, None
            self._voted_at = {v: at for v, at in self._voted_at.items() if v in self.agreed.voters}

    def voted(self, voter: int, stamped_at: float) -> None:
        """A voter has returned a stamp of that time."""
        if any(voter in each.voters for each in (self.agreed, self.proposed) if each is not None):
            self._voted_at[voter] = max(stamped_at, self._voted_at.get(voter, -math.inf))

    @property
    def supported_at(self) -> float:
        """The latest time of which a majority has returned stamps, in each list that counts."""
        if self.agreed is None:
            return -math.inf
        lists = [self.agreed] if self.proposed is None else [self.agreed, self.proposed]
        return min(_supported_at(each.voters, self._voted_at) for each in lists)


def _supported_at(voters: frozenset[int], voted_at: Mapping[int, float]) -> float:
    times = sorted((voted_at.get(voter, -math.inf) for voter in voters), reverse=True)
    needed = majority(len(times))
    return times[needed - 1] if needed <= len(times) else -math.inf
