"""Permissions of keys. Without keys, any peer may do everything that the other rules allow."""

from __future__ import annotations

from dataclasses import replace

from diloco_broker.core.members.members import Member
from diloco_protocol import messages
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.roles import Peer, Role

# Actions that each role may request with `control`; an operator may request all.
_READS_STATUS = frozenset({"status"})
_READS_MODEL = frozenset({"status", "manifest"})
_MAY_ASK = {Role.WORKER: _READS_MODEL, Role.RELAY: _READS_MODEL, Role.MONITOR: _READS_STATUS}


def check(peer: Peer | None, message: messages.Message) -> None:
    """Raise ProtocolError if this key does not permit this message."""
    if peer is None:
        return
    role, may_not = peer.role, ""
    match message:
        case messages.Attach(relay=name) if peer != Peer(Role.RELAY, name):
            may_not = f"be the relay {name!r:.80}; use the key of that relay"
        case messages.Control(action=action) if action not in _MAY_ASK.get(role, {action}):
            may_not = f"request {action!r:.60}; use the key of an operator"
        case messages.Join() if role is not Role.WORKER:
            may_not = "train; use the key of a worker"
        case messages.Join(worker_id=name) if name != peer.name:
            text = f"{peer} may train only under its own name, not as {name!r:.80}; omit worker_id, or "
            raise _not_allowed(f"{text}use the key of that worker.")
        case messages.Promise() if role is not Role.OPERATOR:
            may_not = "be a standby; use the key of an operator"
        case messages.Probe() if role is Role.MONITOR:
            may_not = "send probes; use the key of a worker or an operator"
        case messages.Pull(session=None) | messages.Credit(session=None) if role is Role.MONITOR:
            may_not = "read the model; use the key of a worker or an operator"
    if may_not:
        raise _not_allowed(f"{peer} may not {may_not}.")


def signed(peer: Peer | None, control: messages.Control) -> messages.Control:
    """A request of an operator, with the name that their key proves."""
    if peer is None:
        return control
    return replace(control, arguments={**control.arguments, "who": str(peer)})


def is_own(peer: Peer, member: Member) -> bool:
    """Whether this session belongs to this key; with any other key it is invalid."""
    return peer == Peer(Role.WORKER, member.worker_id)


def _not_allowed(sentence: str) -> ProtocolError:
    return ProtocolError(Code.NOT_ALLOWED, sentence[0].upper() + sentence[1:])
