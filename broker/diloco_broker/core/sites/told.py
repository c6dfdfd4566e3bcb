"""What a relay's parent tells it that concerns its workers: they hear it as from their own broker."""

from __future__ import annotations

from diloco_broker.core import effects, events
from diloco_broker.core.members import admission
from diloco_broker.core.operations import ending, orders
from diloco_broker.core.state import RunState
from diloco_protocol.messages import Notice

# Notices that are passed on; others are between a relay and its parent.
PASSED_ON = (orders.SAVE, orders.STOP, "kick", "last_round", "over")


def told(state: RunState, event: events.Told) -> effects.Effects:
    """Pass a notice on. One that comes again, after the way was broken, changes nothing."""
    notice = event.notice
    match notice.what:
        case orders.SAVE | orders.STOP as action:
            known = state.orders.get(action)
            if known is None or known.number != notice.round:
                yield effects.warning(f"The parent asks each worker to {orders.WHAT[action]}.")
                yield from orders.give(state, action, notice.round)
        case "kick":
            yield from _kick(state, notice)
        case "last_round":
            for member in state.members:
                yield member.tell(notice)
        case "over":
            yield from ending.told(state, notice.text)


def _kick(state: RunState, notice: Notice) -> effects.Effects:
    name = notice.worker_id or ""
    member = state.members.named(name)
    relay = state.members.relay_of(name)
    if member is not None:
        yield effects.warning(f"The parent removes {name}: an operator asked for it.")
        yield from admission.kick(state, member)
    elif relay is not None:
        yield relay.tell(notice)
    elif not state.absences.kicked(name):
        yield effects.warning(f"The parent asks to remove {name!r:.80}, which is not here.")


def parent(state: RunState, event: events.Parent) -> effects.Effects:
    """It is shown how this relay stands with its parent."""
    state.parent = event
    yield from ()


def model_refused(state: RunState, event: events.ModelRefused) -> effects.Effects:
    """The parent does not take the model of the first worker here; another may do better."""
    if state.gate is not None:
        state.gate.is_refused(event.text)
    yield from ()
