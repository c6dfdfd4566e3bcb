"""For whom a worker votes, where a hub has a standby. Pure.

A hub may release versions while a majority of its workers, or its standby, vouch for it; the standby
takes over with a majority as well. Each asks with a stamp, and a worker answers by returning it. A vote
for one is the word that the other gets none for so long: this module keeps it.

A voter is one life of a process. Another life has another number, since it knows nothing of such words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from diloco_protocol.messages import Notice, Vote
from diloco_worker.session import effects

# By how much a word is kept longer than others count on it: clocks run at different rates.
SAFETY = 1.05
REPLACED = "This broker was replaced by its standby, which has the run now."


@dataclass
class Votes:
    """See the head of this module; `voter` is the number of this life."""

    voter: int
    _term: int = 0  # of the newest hub
    _for: str = ""  # who got the last vote
    _until: float = -math.inf  # before that the other gets none

    def goes_along(self, term: int) -> bool:
        """A hub lets this worker in. False for one that was replaced by another where it has been."""
        self._term, before = max(self._term, term), self._term
        return term >= before

    def asked(self, notice: Notice, token: bytes, now: float) -> Iterator[effects.Effect]:
        """A hub or a standby asks for a vote."""
        if notice.stamp is None or not 0 < notice.seconds < math.inf:
            return
        if self._for not in ("", notice.what) and now < self._until:
            return
        if self._for != notice.what:
            self._for, self._until = notice.what, now
        self._until = max(self._until, now + SAFETY * notice.seconds)
        yield effects.Send(Vote(token, self.voter, notice.stamp))
