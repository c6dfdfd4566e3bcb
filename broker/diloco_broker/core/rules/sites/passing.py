"""How a relay passes a version of its parent's on: as what its closing round makes, under its own name.

Instead of an outer step the parent makes the version. Between the push of a site and the version that
has it the parent may have made others, so the counter, and with it the number of the round, may leap.
"""

from __future__ import annotations

from diloco_broker.core import effects, events
from diloco_broker.core.rules import grants, rounds
from diloco_broker.core.state.members import Member
from diloco_broker.core.state.run import RunState
from diloco_protocol.errors import Code
from diloco_protocol.messages import Error, Push, Released

_PARTLY = "A part of this push is counted already; push what the newest version does not name."


def passed(state: RunState, event: events.Passed) -> effects.Effects:
    """The version is whole: readers get its chunks, and the next round opens."""
    round_, released = state.closing, event.released
    assert round_ is not None and round_.fragment == released.fragment
    state.versions.rename(released.fragment, released.version)
    # Not `released.round`: a parent that has adopted a newer version says the round of its checkpoint.
    behind = state.versions[released.fragment].record.version.counter
    round_.number += released.version.counter - 1 - behind
    state.parents = released
    yield from _drop_what_came_another_way(state, released)
    for index, wire in enumerate(event.wires):
        yield from rounds.stepped(state, events.Stepped(released.fragment, index, wire))


def _drop_what_came_another_way(state: RunState, released: Released) -> effects.Effects:
    """A worker has come here with a push that was under way elsewhere, and has been counted there."""
    for each in [s for s in state.submissions if not s.is_chosen]:
        push, ledger = each.push, released.ledger
        if ledger.names_any_of({each.worker_id: push.push_id}):
            state.submissions.drop(each)  # its worker reads the same ledger
            member = state.members.named(each.worker_id)
            if member is not None:
                member.uploads.void(push.fragment, push.push_id)
        elif push.contents is not None and ledger.names_any_of(push.contents):
            state.submissions.drop(each)
            yield from grants.refuse(state, push.fragment, each.key, Code.CONTAINED, _PARTLY)
    for member in state.members:
        waiting = member.deferred.get(released.fragment)
        if waiting is not None and released.ledger.names_any_of(
            {member.worker_id: waiting.push_id, **(waiting.contents or {})}
        ):
            member.take_deferred(released.fragment)
            yield from _is_over(member, waiting)


def _is_over(member: Member, push: Push) -> effects.Effects:
    if push.contents is not None:
        yield member.tell(Error(Code.CONTAINED, _PARTLY, push_id=push.push_id, about="push"))
