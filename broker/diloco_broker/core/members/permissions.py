"""What a key is good for. Without keys everybody may do everything that the other rules allow."""

from __future__ import annotations

from dataclasses import replace

from diloco_broker.core.members.members import Member
from diloco_protocol import messages
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.roles import Peer, Role

# What each role may ask for with `control`; an operator may ask for anything.
_READS_STATUS = frozenset({"status"})
_READS_MODEL = frozenset({"status", "manifest"})
_MAY_ASK = {Role.WORKER: _READS_MODEL, Role.RELAY: _READS_MODEL, Role.MONITOR: _READS_STATUS}


def check(peer: Peer | None, message: messages.Message) -> None:
    """Raises ProtocolError where this key is not good for this message."""
    if peer is None:
        return
    match message:
        case messages.Attach(relay=name):
            _check_relay(peer, name)
        case messages.Control(action=action):
            if action not in _MAY_ASK.get(peer.role, {action}):
                raise _not_allowed(
                    f"{peer} may not ask for {action!r:.60}; that takes the key of an operator."
                )
        case messages.Join():
            if peer.role is not Role.WORKER:
                raise _not_allowed(f"{peer} may not train; that takes the key of a worker.")
            if message.worker_id != peer.name:
                raise _not_allowed(
                    f"{peer} may train under its own name only, not as {message.worker_id!r:.80}; leave "
                    "worker_id out, or take the key of that worker."
                )
        case messages.Promise() if peer.role is not Role.OPERATOR:
            raise _not_allowed(f"{peer} may not be a standby; that takes the key of an operator.")
        case messages.Probe() if peer.role is Role.MONITOR:
            raise _not_allowed(f"{peer} may not measure the way; that takes another key.")
        case messages.Pull(session=None) | messages.Credit(session=None) if (
            peer.role is Role.MONITOR
        ):
            raise _not_allowed(f"{peer} may not read the model; that takes another key.")


def _check_relay(peer: Peer, name: str) -> None:
    if peer != Peer(Role.RELAY, name):
        raise _not_allowed(f"{peer} may not be the relay {name!r:.80}; that takes its own key.")


def signed(peer: Peer | None, control: messages.Control) -> messages.Control:
    """What an operator asks for, under the name that their key proves."""
    if peer is None:
        return control
    return replace(control, arguments={**control.arguments, "who": str(peer)})


def is_own(peer: Peer, member: Member) -> bool:
    """Does this session belong to this key? Under another one it is worth no more than a made-up one."""
    return peer == Peer(Role.WORKER, member.worker_id)


def _not_allowed(sentence: str) -> ProtocolError:
    return ProtocolError(Code.NOT_ALLOWED, sentence[0].upper() + sentence[1:])
