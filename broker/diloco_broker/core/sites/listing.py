"""Who is behind a relay, for people: told by the relay, kept by its parent. Nothing is decided by it.

A relay lists those that are connected to it first, and fills what room is left with those behind relays
of its own: a heartbeat is bounded, whatever stands behind.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from diloco_broker.core.members.compatibility import sync_every_of
from diloco_broker.core.members.members import MAX_STATE_LENGTH, Member
from diloco_broker.core.operations import orders
from diloco_broker.core.state import RunState, SiteAway
from diloco_protocol.feed import DEAD
from diloco_protocol.messages import MOST_BEHIND, MOST_LEVELS, Behind, Heartbeat, is_worker_id

LONGEST_HOST = 64  # characters
MOST_AWAY = 100  # relays that are shown as missing
# A worker that missed two heartbeats of the default interval is called slow before it is called dead.
SLOW_AFTER_S = 75.0


def health_of(member: Member, now: float) -> str:
    """ok, slow, stalled or lost; a dead worker is not a member."""
    if member.liveness.disconnected_at is not None:
        return "lost"
    if member.liveness.is_stalled:
        return "stalled"
    return "slow" if now - member.liveness.last_seen > SLOW_AFTER_S else "ok"


def listed(state: RunState) -> tuple[Behind, ...]:
    """Those here, in the order of the tree, then the dead; at most `MOST_BEHIND`."""
    members = sorted(state.members, key=lambda member: member.worker_id)
    # Those that are not well stay where there is no room for all.
    members.sort(key=lambda member: health_of(member, state.now) == "ok")
    members = sorted(members[:MOST_BEHIND], key=lambda member: member.worker_id)
    room = MOST_BEHIND - len(members)
    found: list[Behind] = []
    for member in members:
        found.append(_entry(state, member, health_of(member, state.now)))
        below = behind(state, member, room)
        room -= len(below)
        found += (replace(each, level=each.level + 1) for each in below)
    dead = [_entry(state, each.member, DEAD) for each in state.absences.dead.values()]
    return tuple(found + dead[: MOST_BEHIND - len(found)])


def _entry(state: RunState, member: Member, health: str) -> Behind:
    entry = Behind(member.worker_id, **status_of(state, member, health, state.now))
    entry.host = entry.host[:LONGEST_HOST]
    return entry


def status_of(state: RunState, member: Member, health: str, now: float) -> dict[str, Any]:
    """The fields of `WorkerStatus`, which a relay tells its parent and the feed everybody."""
    figures = member.figures
    is_finite = figures.loss is None or math.isfinite(figures.loss)
    return {
        "workers": member.workers,
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
        "same_as": same_as(state, member),
    }


def same_as(state: RunState, member: Member) -> str | None:
    """Who sent the same update as this worker, and is still here."""
    other = member.figures.same_as
    return other if other is not None and other in state.members else None


def _since(at: float | None, now: float) -> float | None:
    return None if at is None else round(now - at, 3)


def heard(state: RunState, member: Member, beat: Heartbeat) -> None:
    """A relay has told who is behind it, and what they have done of what was asked."""
    if not member.is_relay:
        return
    if beat.behind is not None:
        member.listed = _sound(beat.behind)
        member.listed_at = state.now
        are_here(state, {each.worker_id for each in member.listed if each.health != DEAD})
    orders.replied(state, member, beat.replies or ())


def is_away(state: RunState, relay: Member) -> None:
    """A relay is given up, with workers behind it: it is shown as missing until it is back."""
    state.sites_away.pop(relay.worker_id, None)
    names = frozenset(
        each.worker_id for each in relay.listed if each.workers is None and each.health != DEAD
    )
    state.sites_away[relay.worker_id] = SiteAway(state.now, relay.workers or 0, names)
    while len(state.sites_away) > MOST_AWAY:
        del state.sites_away[next(iter(state.sites_away))]


def are_here(state: RunState, names: Collection[str]) -> None:
    """These are named here: a site that is away is not missing once all of its workers are elsewhere."""
    state.absences.are_alive(names)
    for site, away in list(state.sites_away.items()):
        left = away.names.difference(names)
        if away.names and not left:
            del state.sites_away[site]
        elif left != away.names:
            state.sites_away[site] = replace(away, names=left)


def _sound(told: Sequence[Behind]) -> tuple[Behind, ...]:
    """What may be shown of a list: numbers are in range already, texts and levels are not."""
    found: list[Behind] = []
    level = -1
    for each in told[:MOST_BEHIND]:
        level = min(each.level, level + 1, MOST_LEVELS)
        is_finite = each.loss is None or math.isfinite(each.loss)
        if is_worker_id(each.worker_id):
            found.append(
                replace(
                    each,
                    level=level,
                    host=each.host[:LONGEST_HOST],
                    state=each.state[:MAX_STATE_LENGTH],
                    health=each.health[:MAX_STATE_LENGTH],
                    loss=each.loss if is_finite else None,
                    loss_is_finite=each.loss_is_finite and is_finite,
                    same_as=each.same_as if is_worker_id(each.same_as or "") else None,
                )
            )
    return tuple(found)


def behind(state: RunState, member: Member, room: int) -> list[Behind]:
    """The first entries of a relay's list, with ages as of now; who has come here since stands here."""
    more = round(max(0.0, state.now - member.listed_at), 3)
    return [
        replace(
            each,
            beat_age_s=each.beat_age_s + more,
            inner_age_s=None if each.inner_age_s is None else each.inner_age_s + more,
            sync_age_s=None if each.sync_age_s is None else each.sync_age_s + more,
        )
        for each in member.listed[:room]
        if each.worker_id not in state.members
    ]
