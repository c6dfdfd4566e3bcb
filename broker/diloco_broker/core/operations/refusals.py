"""Refusals of messages: answers to their senders, warnings, and counters."""

from __future__ import annotations

from diloco_broker.core import effects, events
from diloco_broker.core.members import seeding
from diloco_broker.core.operations import ending
from diloco_broker.core.state import RunState
from diloco_protocol import messages
from diloco_protocol.errors import Code, ProtocolError

# Malformed messages after which a connection is closed, unless it is a member's.
UNAUTHENTICATED_NOISE = 20
# Connections whose malformed messages are counted; above it all counts are reset to bound the memory.
CONNECTIONS_REMEMBERED = 1000
# Refusals after which the peer should retry.
WORTH_A_RETRY = frozenset({Code.STOPPING, Code.NO_MODEL, Code.STANDBY})


def malformed(state: RunState, event: events.Malformed) -> effects.Effects:
    state.totals.malformed += 1
    yield effects.Send(event.route, messages.Error(event.code, event.sentence))
    text = f"Refused a malformed message: {event.sentence}"
    yield from state.warn(event.code, text, is_listed=False)
    if state.members.on_route(event.route) is None:
        noisy = state.refusals.noisy
        noisy[event.route] += 1
        if noisy[event.route] >= UNAUTHENTICATED_NOISE:
            del noisy[event.route]
            yield effects.Disconnect(event.route)
        elif len(noisy) > CONNECTIONS_REMEMBERED:
            noisy.clear()


def connection_ended(state: RunState, event: events.ConnectionEnded) -> effects.Effects:
    state.totals.ended_connections += 1
    # `why` contains numbers that differ each time, so it is not the key of repeated warnings.
    yield from state.warn("connection", f"Closed a connection: {event.why}.", is_listed=False)


def refuse(
    state: RunState, route: effects.Route, message: messages.Message, error: ProtocolError
) -> effects.Effects:
    """Refuse a message: answer its sender, and update the round and the seeding that it belonged to."""
    push_id, member = None, None
    who = f" of {message.worker_id[:64]}" if isinstance(message, messages.Join) else ""
    retry = error.code in WORTH_A_RETRY
    if isinstance(message, messages.Push | messages.Chunk | messages.Commit):
        push_id = message.push_id
        member = state.members.with_session(message.session or b"")
        if not retry:  # the sender retries and loses nothing, so this does not count as a rejection
            state.reject(member.worker_id if member else "", error.code.value, str(error))
        if member is not None:
            member.figures.rejected += not retry
            who = f" of {member.worker_id}"
            route = member.control
        is_seeding = getattr(message, "purpose", None) is messages.Purpose.SEEDING
        if is_seeding and member:
            yield from seeding.reject(state, member)
    is_over = not retry and error.code != Code.LATE
    if isinstance(message, messages.Push) and is_over and member is not None:
        is_gradient = message.purpose is messages.Purpose.GRADIENT
        if is_gradient and 0 <= message.fragment < len(state.versions.trained):
            state.skip(member.worker_id, message.fragment)
    if isinstance(message, messages.Join) and error.code == Code.STOPPING:
        assert state.stopping is not None
        # The worker joined too late to receive the farewell that was sent to all members.
        yield effects.Send(route, ending.farewell(state.stopping))
    yield effects.Send(route, messages.Error(error.code, str(error), retry, push_id, message.kind))
    if not retry:
        # Without the worker id, which a hostile peer may change with each join.
        whose = "" if isinstance(message, messages.Join) else who
        cause = f"{message.kind}{whose} {error.code.value}"
        text = f"Refused a {message.kind}{who}: {error}"
        yield from state.warn(cause, text, is_listed=bool(who))
