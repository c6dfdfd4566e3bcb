"""What a relay says of its site: to its parent in heartbeats, and to its own displays of the parent."""

from __future__ import annotations

import math
from dataclasses import replace

from diloco_broker.core.events import Parent
from diloco_broker.core.operations import orders
from diloco_broker.core.sites import listing
from diloco_broker.core.state import RunState
from diloco_protocol.messages import Behind, Heartbeat, Reply
from diloco_worker.session.session import Session

# Between two heartbeats that nothing but news of the workers is the reason for: a site of 64 workers has
# 10 kB of them.
NEWS_S = 5.0


class Report:
    """See the head of this module. Times are the core's clock.

    Args:
        address: of the parent, for people.
        name: of the relay there.
        now: when it begins to look for it.
    """

    def __init__(self, address: str, name: str, now: float) -> None:
        self._address, self._name = address, name
        self._lost_at: float | None = now
        self._offered_at: float | None = None
        self._told: tuple[tuple[Behind, ...], tuple[Reply, ...]] = ((), ())
        self._looked_at = -math.inf

    def look(self, session: Session | None, now: float, *, is_under_way: bool) -> Parent:
        """How it stands with the parent: shown with the site's state."""
        is_here = session is not None and session.connection.is_joined
        if is_here:
            self._lost_at = None
        elif self._lost_at is None:
            self._lost_at = now
        if not is_under_way:
            self._offered_at = None
        elif self._offered_at is None:
            self._offered_at = now
        return Parent(self._address, self._name, self._lost_at, self._offered_at)

    def has_news(self, state: RunState, now: float) -> bool:
        """Is there something that the parent should hear before the next heartbeat is due?"""
        if orders.replies(state) != self._told[1]:
            return True
        if now - self._looked_at < NEWS_S:
            return False
        self._looked_at = now
        return _lasting(listing.listed(state)) != self._told[0]

    def beat(self, state: RunState) -> Heartbeat:
        """How the site does; the session is filled in when it is sent."""
        figures = [member.figures for member in state.members]
        losses = [f.loss for f in figures if f.loss is not None and math.isfinite(f.loss)]
        speeds = [f.steps_per_s for f in figures if f.steps_per_s is not None]
        is_training = bool(figures) and not state.flights and state.closing is None
        # Where workers wait for each other, the site is as fast as the slowest. Where they do not, the
        # parent's H is that of the fastest, and the site divides it among the others (`dylu`).
        pace = max if state.config.is_async else min
        behind, replies = listing.listed(state), orders.replies(state)
        self._told, self._looked_at = (_lasting(behind), replies), state.now
        return Heartbeat(
            b"",
            step=sum(f.step for f in figures),
            inner_step=min((f.inner_step for f in figures), default=0),
            state="training" if is_training else "waiting",
            steps_per_s=pace(speeds, default=None),
            loss=sum(losses) / len(losses) if losses else None,
            tokens=sum(f.tokens for f in figures),
            workers=state.members.workers,
            behind=behind,
            replies=replies or None,
        )


def _lasting(entries: tuple[Behind, ...]) -> tuple[Behind, ...]:
    """The same without ages, which are new each time."""
    return tuple(replace(e, beat_age_s=0.0, inner_age_s=None, sync_age_s=None) for e in entries)
