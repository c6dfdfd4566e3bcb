"""Pulls of versions: by workers, on their data connections, and by observers, which have not joined."""

from __future__ import annotations

from dataclasses import replace

from diloco_broker.core import effects
from diloco_broker.core.members.members import Binding, Member
from diloco_broker.core.state import RunState
from diloco_broker.core.versions.readers import MAX_OBSERVERS, Reader, lane_credit
from diloco_broker.standby import fence
from diloco_protocol import messages
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.errors import Code, ProtocolError


def pull(state: RunState, member: Member, pull: messages.Pull) -> effects.Effects:
    """Send a worker the newest version of a fragment, or the next one once it is made."""
    _check(state, pull)
    is_bound = member.bulk is not None and _has_reader(state, member)
    if not is_bound or not fence.may_release(state):
        # The pull overtook the credit that binds the data connection. Or this hub has no lease: it must
        # not send a version that a broker that may have replaced it does not have.
        member.early_pulls[pull.fragment] = pull
    else:
        assert member.bulk is not None
        reader = _reader_of(state, member, member.bulk)
        yield from _read(state, reader, _skip_foreign_version(state, member, pull))


def _skip_foreign_version(state: RunState, member: Member, pull: messages.Pull) -> messages.Pull:
    """Skip the current version in asynchronous mode if it lacks an unfinished push of the reader.

    Pushes of other workers make versions while this worker trains. It would download each of them and
    still wait for the version that contains its own push.
    """
    version = state.versions[pull.fragment].version
    if not state.config.is_async or version is None or not 0 <= pull.after < version.counter:
        return pull
    pool = state.submissions.pool(pull.fragment).values()
    pushes = [each.push for each in pool if each.worker_id == member.worker_id]
    deferred = member.deferred.get(pull.fragment)
    pushes += [deferred] if deferred is not None else []
    if all(state.standing(member, push).is_full for push in pushes):
        return pull
    return replace(pull, after=version.counter)


def credit(
    state: RunState, member: Member, route: effects.Route, credit: messages.Credit
) -> effects.Effects:
    """Send a worker more chunks on the connection that this credit was received on."""
    state.slack.credited(member.bulk, state.run_time)
    if member.processes > 1:
        yield from _credit_of_lane(state, member, route, credit)
        return
    if route not in (member.control, member.bulk):
        state.versions.forget(member.bulk)
        state.members.bind(member, route)
    if member.bulk is not None:
        reader = _reader_of(state, member, member.bulk)
        yield from state.versions.add_credit(reader, credit.chunks, state.now)
        yield from _read_early(state, member, reader)


def _read_early(state: RunState, member: Member, reader: Reader) -> effects.Effects:
    while member.early_pulls and fence.may_release(state):
        pull = member.early_pulls.popitem()[1]
        yield from _read(state, reader, _skip_foreign_version(state, member, pull))


def go_on(state: RunState) -> effects.Effects:
    """Answer the pulls that a hub received while it had no lease."""
    for member in state.members:
        if member.early_pulls and member.bulk is not None and _has_reader(state, member):
            yield from _read_early(state, member, _reader_of(state, member, member.bulk))


def _has_reader(state: RunState, member: Member) -> bool:
    """False if one of several data connections is lost: all are void until the worker rejoins."""
    return member.processes == 1 or member.bulk in state.versions.readers


def _credit_of_lane(
    state: RunState, member: Member, route: effects.Route, credit: messages.Credit
) -> effects.Effects:
    index = member.lane_of(route)
    if member.bulk is None or not _has_reader(state, member):
        if index:  # its initial credit grows until lane 0 is bound
            binding = member.lanes[index]
            most = lane_credit(member.processes)
            given = min(binding.credit + max(0, credit.chunks), most)
            member.lanes[index] = replace(binding, credit=given)
        return
    if not index and route not in (member.control, member.bulk):
        text = "This data connection is not bound; send `lane` first."
        raise ProtocolError(Code.BAD_HEADER, text)
    reader = _reader_of(state, member, member.bulk)
    yield from state.versions.add_credit(reader, credit.chunks, state.now, index, member.processes)


def lane(
    state: RunState, member: Member, route: effects.Route, lane: messages.Lane
) -> effects.Effects:
    """Bind a data connection of a worker of several processes."""
    shares = _check_lane(state, member, route, lane)
    credit = min(max(0, lane.credit), lane_credit(member.processes))
    if lane.index == 0:
        state.versions.forget(member.bulk)
        state.members.bind(member, route)
        bound = {0: Binding(route, shares, credit), **member.lanes}
    else:
        former = member.lanes.get(lane.index)
        state.members.bind_lane(member, lane.index, Binding(route, shares, credit))
        if former is not None and member.bulk is not None:
            # Chunks that were sent on the former one are lost: the worker reopens all of them.
            state.versions.forget(member.bulk)
            text = f"Data connection {lane.index} was opened twice; join again."
            yield member.tell(messages.Rejoin(state.epoch, text))
            return
        bound = {lane.index: member.lanes[lane.index]}
    if member.bulk is None:
        return
    reader = _reader_of(state, member, member.bulk)
    for index, binding in bound.items():
        state.versions.bind(reader, index, binding.route, binding.shares)
        yield from state.versions.add_credit(
            reader, binding.credit, state.now, index, member.processes
        )
    yield from _read_early(state, member, reader)


def _check_lane(
    state: RunState, member: Member, route: effects.Route, lane: messages.Lane
) -> tuple[Bitmap, ...]:
    """Return the chunks of each fragment that it carries; raises ProtocolError for an invalid lane."""
    if not (member.processes > 1 and 0 <= lane.index < member.processes):
        text = f"A worker of {member.processes} processes has no lane {lane.index}."
        raise ProtocolError(Code.BAD_HEADER, text)
    others = {each.route for index, each in member.lanes.items() if index != lane.index}
    if lane.index:
        others.add(member.bulk or b"")
    if route in {member.control, *others}:
        text = "This connection is already in use; open a separate one for each lane."
        raise ProtocolError(Code.BAD_HEADER, text)
    fragments = state.versions.fragments
    if len(lane.shares) != len(fragments):
        text = f"The lane has shares of {len(lane.shares)} fragments, the run has {len(fragments)}."
        raise ProtocolError(Code.BAD_HEADER, text)
    return tuple(
        Bitmap.from_bytes(share, each.layout.chunks)
        for share, each in zip(lane.shares, fragments, strict=True)
    )


def observe(
    state: RunState, route: effects.Route, message: messages.Pull | messages.Credit
) -> effects.Effects:
    """Handle a pull or credit of an observer, which has not joined."""
    versions = state.versions
    if isinstance(message, messages.Credit):
        if route in versions.readers:
            yield from versions.add_credit(versions.readers[route], message.chunks, state.now)
        return
    _check(state, message)
    if route not in versions.readers and len(versions.observers) >= MAX_OBSERVERS:
        text = f"This broker already has {MAX_OBSERVERS} observers, the maximum; try again later."
        raise ProtocolError(Code.NOT_ALLOWED, text)
    yield from _read(state, versions.reader(route, route, state.now), message)


def _reader_of(state: RunState, member: Member, bulk: effects.Route) -> Reader:
    return state.versions.reader(bulk, member.control, state.now, member.account)


def _check(state: RunState, pull: messages.Pull) -> None:
    fragments = state.versions.fragments
    if not fragments:
        raise ProtocolError(Code.NO_MODEL, "The broker has no model yet; try again later.")
    if not 0 <= pull.fragment < len(fragments) or not fragments[pull.fragment].layout.chunks:
        text = f"This run has no fragment {pull.fragment} to pull."
        raise ProtocolError(Code.BAD_HEADER, text)
    if pull.held is not None:
        Bitmap.from_bytes(pull.held, fragments[pull.fragment].layout.chunks)


def _read(state: RunState, reader: Reader, pull: messages.Pull) -> effects.Effects:
    held = (pull.held_version, pull.held) if pull.held_version and pull.held else None
    yield from state.versions.pull(reader, pull.fragment, pull.after, held, pull.delta_of)
    yield from state.versions.add_credit(reader, pull.credit, state.now)


def give_up(state: RunState) -> effects.Effects:
    """Disconnect readers that stopped in the middle of a version, since the broker keeps it for them."""
    stopped = [each for each in state.versions.readers.values() if each.has_stopped(state.now)]
    for reader in stopped:
        state.versions.forget(reader.route)
        yield effects.Disconnect(reader.route)
