"""Who reads versions: workers, on their bulk connection, and observers that have not joined."""

from __future__ import annotations

from diloco_broker.core import effects
from diloco_broker.core.state.members import Member
from diloco_broker.core.state.run import RunState
from diloco_broker.core.state.versions import MAX_OBSERVERS, Reader
from diloco_protocol import messages
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.errors import Code, ProtocolError


def pull(state: RunState, member: Member, pull: messages.Pull) -> effects.Effects:
    """A worker asks for the newest version of a fragment, or for the next."""
    _check(state, pull)
    if member.bulk is None:
        member.early_pulls[pull.fragment] = pull  # it overtook the credit that binds the connection
    else:
        yield from _read(state, _reader_of(state, member, member.bulk), pull)


def credit(
    state: RunState, member: Member, route: effects.Route, credit: messages.Credit
) -> effects.Effects:
    """A worker can take more chunks, on the connection that this comes on."""
    if route not in (member.control, member.bulk):
        state.versions.forget(member.bulk)
        member.bulk = route
    if member.bulk is not None:
        reader = _reader_of(state, member, member.bulk)
        yield from state.versions.add_credit(reader, credit.chunks, state.now)
        while member.early_pulls:
            yield from _read(state, reader, member.early_pulls.popitem()[1])


def observe(
    state: RunState, route: effects.Route, message: messages.Pull | messages.Credit
) -> effects.Effects:
    """Somebody reads who has not joined."""
    versions = state.versions
    if isinstance(message, messages.Credit):
        if route in versions.readers:
            yield from versions.add_credit(versions.readers[route], message.chunks, state.now)
        return
    _check(state, message)
    if route not in versions.readers and len(versions.observers) >= MAX_OBSERVERS:
        text = f"There are {MAX_OBSERVERS} observers already; try later."
        raise ProtocolError(Code.NOT_ALLOWED, text)
    yield from _read(state, versions.reader(route, route, state.now), message)


def _reader_of(state: RunState, member: Member, bulk: effects.Route) -> Reader:
    return state.versions.reader(bulk, member.control, state.now, member.account)


def _check(state: RunState, pull: messages.Pull) -> None:
    fragments = state.versions.fragments
    if not fragments:
        raise ProtocolError(Code.NO_MODEL, "The broker has no model yet; try again later.")
    if not 0 <= pull.fragment < len(fragments) or not fragments[pull.fragment].layout.chunks:
        text = f"There is no fragment {pull.fragment} to pull in this run."
        raise ProtocolError(Code.BAD_HEADER, text)
    if pull.held is not None:
        Bitmap.from_bytes(pull.held, fragments[pull.fragment].layout.chunks)


def _read(state: RunState, reader: Reader, pull: messages.Pull) -> effects.Effects:
    held = (pull.held_version, pull.held) if pull.held_version and pull.held else None
    yield from state.versions.pull(reader, pull.fragment, pull.after, held)
    yield from state.versions.add_credit(reader, pull.credit, state.now)


def give_up(state: RunState) -> effects.Effects:
    """End the connections of those who have begun with a version, which is kept for them, and stop."""
    for reader in state.versions.given_up(state.now):
        state.versions.forget(reader.route)
        yield effects.Disconnect(reader.route)
