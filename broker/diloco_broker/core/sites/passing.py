"""How a relay passes a version of its parent's on: under its own name, to whoever waits for one.

Most often it has what the site sent up (`flights`). It may also be one that the parent made without the
site: that is the newest for those who join, and whoever has a push in flight waits for the next.
"""

from __future__ import annotations

from diloco_broker.core import effects, events
from diloco_broker.core.members.members import Member
from diloco_broker.core.operations import ending, progress
from diloco_broker.core.rounds import sequence
from diloco_broker.core.sites import flights
from diloco_broker.core.state import Flight, RunState, UnreleasedVersion
from diloco_broker.core.versions.record import FragmentRecord
from diloco_protocol.errors import Code
from diloco_protocol.messages import Error, Push, Released


def passed(state: RunState, event: events.Passed) -> effects.Effects:
    """A version is here, whole: readers get it, and rounds that are over at the parent are left out."""
    released = event.released
    flight = state.flights.get(released.fragment)
    is_ours = flight is not None and flight.push.push_id == event.push_id
    state.parents = released
    state.versions.make(released.fragment, released.version, released.version.counter)
    for index, wire in enumerate(event.wires):
        yield from state.versions.chunk_ready(released.fragment, index, wire)
    yield from _hand_out(state, released, flight if is_ours else None)
    yield from _drop_what_came_another_way(state, released)
    if state.round is not None and state.round.barrier is not None:
        yield from flights.go_on_from(state, released.round + 1)
    if not state.flights:
        yield from ending.refuse_the_rest(state)


def _hand_out(state: RunState, released: Released, flight: Flight | None) -> effects.Effects:
    fragment, version = released.fragment, released.version
    made_from = state.versions[fragment].version
    record = FragmentRecord(
        version, released.ledger, version.counter, released.round, released.averaged
    )
    if flight is None:
        yield effects.RecordVersion(version, made_from, fragment, released.round)
        progress.show(state, released.round + 1)
        yield from state.versions.release(fragment, record)
        return
    del state.flights[fragment]
    ended = flight.update
    ended.number = released.round
    for each in ended.chosen:
        each.is_up = False
        state.submissions.drop(each)
        if each.push.base is not None:
            each.staleness = max(0, version.counter - 1 - each.push.base.counter)
    counted = ended.counted()
    yield effects.RecordVersion(version, made_from, fragment, released.round, counted)
    yield from sequence.hand_out(state, UnreleasedVersion(ended, counted, record))


def _drop_what_came_another_way(state: RunState, released: Released) -> effects.Effects:
    """A worker has come here with a push that was under way elsewhere, and has been counted there."""
    for each in [s for s in state.submissions if not s.is_chosen]:
        if each.push.fragment == released.fragment and flights.drop_counted(state, each):
            yield from flights.refuse(state, each, Code.CONTAINED, flights.PARTLY)
    for member in state.members:
        waiting = member.deferred.get(released.fragment)
        if waiting is not None and released.ledger.names_any_of(
            {member.worker_id: waiting.push_id, **(waiting.contents or {})}
        ):
            member.take_deferred(released.fragment)
            yield from _is_over(member, waiting)


def _is_over(member: Member, push: Push) -> effects.Effects:
    if push.contents is not None:
        error = Error(Code.CONTAINED, flights.PARTLY, push_id=push.push_id, about="push")
        yield member.tell(error)
