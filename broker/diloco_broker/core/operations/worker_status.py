"""How a worker does, for people. Nothing is decided by it."""

from __future__ import annotations

import math
from typing import Any

from diloco_broker.core.members.compatibility import sync_every_of
from diloco_broker.core.members.members import Member
from diloco_broker.core.state import RunState

# A worker that missed two heartbeats of the default interval is called slow before it is called dead.
SLOW_AFTER_S = 75.0


def health_of(member: Member, now: float) -> str:
    """ok, slow, stalled or lost; a dead worker is not a member."""
    if member.liveness.disconnected_at is not None:
        return "lost"
    if member.liveness.is_stalled:
        return "stalled"
    return "slow" if now - member.liveness.last_seen > SLOW_AFTER_S else "ok"


def status_of(state: RunState, member: Member, health: str, now: float) -> dict[str, Any]:
    """The fields of `WorkerStatus`."""
    figures = member.figures
    is_finite = figures.loss is None or math.isfinite(figures.loss)
    return {
        "host": figures.host,
        "state": figures.state,
        "health": health,
        "round": figures.last_round,
        "step": figures.step,
        "inner_step": figures.inner_step,
        "inner_age_s": _since(figures.told_at, now),
        "sync_every": sync_every_of(state, member),
        "steps_per_s": figures.steps_per_s,
        "loss": figures.loss if is_finite else None,
        "loss_is_finite": is_finite,
        "staleness": figures.staleness,
        "pushes": figures.pushes,
        "beat_age_s": round(now - member.liveness.last_seen, 3),
        "sync_age_s": _since(figures.counted_at, now),
        "same_as": _same_as(state, member),
    }


def _same_as(state: RunState, member: Member) -> str | None:
    """Who sent the same update as this worker, and is still here."""
    other = member.figures.same_as
    return other if other is not None and other in state.members else None


def _since(at: float | None, now: float) -> float | None:
    return None if at is None else round(now - at, 3)
