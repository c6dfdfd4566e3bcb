"""What becomes of a message that cannot be accepted."""

from __future__ import annotations

from diloco_broker.core import effects, events
from diloco_broker.core.rules import initial_model, rounds, stopping
from diloco_broker.core.state.members import printable
from diloco_broker.core.state.run import RunState
from diloco_protocol import messages
from diloco_protocol.errors import Code, ProtocolError

# What a refusal may be worth trying again for.
WORTH_A_RETRY = frozenset({Code.STOPPING, Code.NO_MODEL})


def malformed(state: RunState, event: events.Malformed) -> effects.Effects:
    state.totals.malformed += 1
    yield effects.Send(event.route, messages.Error(event.code, event.sentence))
    text = f"A message that cannot be read was refused: {event.sentence}"
    yield effects.warning(text)


def refuse(
    state: RunState, route: effects.Route, message: messages.Message, error: ProtocolError
) -> effects.Effects:
    """A message cannot be accepted: its sender is told why, and others only of what concerns them."""
    push_id = None
    who = f" of {printable(message.worker_id, 64)}" if isinstance(message, messages.Join) else ""
    retry = error.code in WORTH_A_RETRY
    if isinstance(message, messages.Push | messages.Chunk | messages.Commit):
        push_id = message.push_id
        member = state.members.with_session(message.session or b"")
        if not retry:  # "not now" loses nothing, and is no refusal
            state.reject(member.worker_id if member else "", error.code.value, str(error))
        if member is not None:
            member.figures.rejected += not retry
            who = f" of {member.worker_id}"
            route = member.control
        is_donation = getattr(message, "purpose", None) is messages.Purpose.DONATION
        if is_donation and member:
            yield from initial_model.reject_donor(state, member)
    if isinstance(message, messages.Push) and not retry and error.code != Code.LATE:
        yield from _skip_this_round(state, message)
    if isinstance(message, messages.Join) and error.code == Code.STOPPING:
        assert state.stopping is not None
        # It was on its way when the others were told.
        yield effects.Send(route, stopping.farewell(state.stopping))
    yield effects.Send(route, messages.Error(error.code, str(error), retry, push_id, message.kind))
    if not retry:
        yield effects.warning(f"Refused a {message.kind}{who}: {error}")


def _skip_this_round(state: RunState, push: messages.Push) -> effects.Effects:
    member = state.members.with_session(push.session)
    known = range(len(state.versions.fragments) - 1)
    if member is not None and push.purpose is messages.Purpose.GRADIENT and push.fragment in known:
        yield from rounds.skip_this_round(state, member.worker_id, push.fragment)
