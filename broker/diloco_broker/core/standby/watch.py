"""Where a hub stands with its standby: the lease, and what has been said on both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco_broker.core import effects
from diloco_broker.core.standby.lease import Lease

# A hub without a lease for so many times its length lets nobody in, and sends its workers away: they may
# be wanted where the run goes on. Shorter gaps pass unnoticed.
ALONE_FOR_LEASES = 2.0


@dataclass
class Watch:
    """See the head of this module. Times are the machine's clock.

    Attributes:
        route: the standby's connection; None before it has come.
        speaks_at, polls_at: when the standby, and workers, are sent the next stamp.
        wants: what the standby said last.
        was_held: whether the lease held when it was last looked at.
        saves: the round before which a checkpoint was asked for, since the standby is to take over.
        has_sent_away: workers have been sent away since it lapsed.
    """

    lease: Lease
    route: effects.Route | None = None
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
