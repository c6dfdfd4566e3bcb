"""Liveness: heartbeats, stalled workers, broken connections, deaths."""

from __future__ import annotations

from diloco_broker.core import effects, events
from diloco_broker.core.members import admission, compatibility, descriptions, seeding
from diloco_broker.core.members.members import Member
from diloco_broker.core.operations import orders
from diloco_broker.core.rounds import sequence
from diloco_broker.core.state import RunState
from diloco_broker.core.versions import pulls
from diloco_broker.standby import fence
from diloco_protocol import messages

# Seconds of silence after which a worker is probed: sending shows whether its connection is broken.
PROBE_AFTER_S = 1.0
# When some connection was closed, all workers are probed, at most this many in a tick.
PROBES_A_TICK = 64
# Seconds between two probes of an observer, which sends no heartbeats.
PROBE_OBSERVERS_S = 10.0
# Seconds that a worker has to reconnect after the broker was suspended: it retries every 2 s, and an
# unanswered connection times out after 3 s.
BACK_WITHIN_S = 6.0


def beat(state: RunState, member: Member, beat: messages.Heartbeat) -> effects.Effects:
    """A heartbeat, whose step count shows whether the training loop hangs."""
    figures, liveness = member.figures, member.liveness
    has_moved = figures.take(beat, state.now)
    liveness.beat(state.now, has_moved=has_moved)
    if figures.warning and not figures.has_warned:  # once: what peers say must not fill the log
        figures.has_warned = True
        yield effects.warning(f"{member.worker_id} warns: {figures.warning}")
    if beat.saved:
        yield from orders.answered(state, member, beat.saved)
    limit = state.config.stall_timeout
    if has_moved:
        yield from mark_active(state, member)
    elif limit and not liveness.is_stalled and liveness.stood_still() > limit:
        stood = f"has stood at step {figures.step} for {liveness.stood_still():.0f} s"
        yield from _stall(state, member, f"{member.worker_id} {stood} though it sends heartbeats")
    number = state.round.number if state.round else 0
    steps = compatibility.sync_every_of(state, member) if state.config.dylu else None
    if (state.alive.round, state.alive.sync_every) != (number, steps):
        state.alive = messages.Notice("alive", round=number, sync_every=steps)
    yield member.tell(state.alive)


def _stall(state: RunState, member: Member, what: str) -> effects.Effects:
    """A worker stalled: the others continue without it unless their round needs more workers."""
    member.liveness.stall()
    follows = tuple(sequence.stall(state, member.worker_id))
    goes_on = state.round is not None and not state.below_floor
    waits = "; rounds continue without it" if goes_on else ""
    yield effects.warning(f"{what}{waits}.")
    yield from follows


def mark_active(state: RunState, member: Member) -> effects.Effects:
    """A worker makes progress. A stalled one is expected again from the next round, or at once if the
    round is below its floor."""
    if member.liveness.move(state.now):
        step = member.figures.step
        yield effects.info(f"{member.worker_id} resumed training at step {step}.")
        yield from sequence.expect_all(state)


def connection_lost(state: RunState, route: effects.Route) -> effects.Effects:
    """A connection broke; its worker has `disconnect_grace` seconds to reconnect."""
    state.versions.forget(route)
    member = state.members.on_route(route)
    if member is not None and route != member.control:
        state.members.lose_lanes(member)
    if member is not None and member.liveness.disconnected_at is None:
        member.liveness.disconnect(state.now)
        yield effects.info(f"A connection of {member.worker_id} broke.")


def stood_still(state: RunState, event: events.StoodStill) -> effects.Effects:
    """The broker was suspended: deadlines have not moved, but connections may have broken."""
    state.back_at = state.now
    own = ", or a step of its torch optimizer took that long" if state.has_own_optimizer else ""
    yield effects.warning(
        f"The broker was suspended for {event.seconds:.0f} s: its process was stopped, or its machine "
        f"slept or was overloaded{own}. That time counts against no worker; workers whose connections "
        f"broke have {BACK_WITHIN_S:g} s to reconnect."
    )


def tick(state: RunState, event: events.Tick) -> effects.Effects:
    """Evict dead workers, and probe silent ones."""
    now = state.now
    state.absences.tick(now)
    if event.lost:
        due = set(state.to_probe)
        state.to_probe += [
            m.worker_id
            for m in state.members
            if m.liveness.disconnected_at is None and m.worker_id not in due
        ]
    for name in state.to_probe[:PROBES_A_TICK]:
        found = state.members.named(name)
        if found is not None:
            yield found.tell(messages.Notice("alive"))
    del state.to_probe[:PROBES_A_TICK]
    timeout = state.config.heartbeat_timeout
    for member in state.members:
        liveness = member.liveness
        silent = now - liveness.last_seen
        if liveness.disconnected_at is not None and _is_given_up(state, member):
            yield from _evict(state, member, "its connection broke and it did not reconnect")
        elif timeout and silent > timeout and not may_be_on_its_way(state):
            yield from _evict(state, member, f"no message for {silent:.0f} s")
        elif silent > PROBE_AFTER_S and now - liveness.probed_at > PROBE_AFTER_S:
            # A dead connection fails only when something is sent on it.
            liveness.probed_at = now
            yield member.tell(messages.Notice("alive"))
    yield from fence.tick(state)
    if state.standby is not None and state.standby.holds:
        yield from pulls.go_on(state)
    for member in fence.sends_away(state):
        text = "This broker has no lease, so another one may have the run; join again."
        yield member.tell(messages.Rejoin(state.epoch, text))
        yield from admission.remove(state, member, "the broker has no lease")
        state.absences.will_return(member)
    yield from sequence.tick(state)
    yield from orders.tick(state)
    yield from pulls.give_up(state)
    descriptions.give_up(state)
    for reader in state.versions.observers:
        if now - reader.probed_at > PROBE_OBSERVERS_S:
            reader.probed_at = now
            yield effects.Send(reader.announce, messages.Notice("alive"))
    yield from seeding.advance(state)


def _is_given_up(state: RunState, member: Member) -> bool:
    """Whether its connection has been broken for longer than `disconnect_grace`."""
    broken, grace = member.liveness.disconnected_at, state.config.disconnect_grace
    is_over = broken is not None and state.now >= broken + grace
    return is_over and not may_be_on_its_way(state)


def may_be_on_its_way(state: RunState) -> bool:
    """Whether the broker was suspended so recently that workers may still be reconnecting."""
    return state.back_at is not None and state.now < state.back_at + BACK_WITHIN_S


def _evict(state: RunState, member: Member, why: str) -> effects.Effects:
    state.totals.deaths += 1
    yield effects.warning(f"{member.worker_id} counts as dead: {why}.")
    seeding.lost(state, member)
    yield from admission.remove(state, member, why)
    state.absences.died(member, why, state.now)
