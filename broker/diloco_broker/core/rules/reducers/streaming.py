"""The streaming reducer: pushes enter the open round, their chunks are added up as they come.

The default of synchronous mode. Of what has arrived only one accumulator is kept, and the few chunks
that came last. So a push counts chunk by chunk: a round that closes while a worker dies takes what it
has delivered.
"""

from __future__ import annotations

from diloco_broker.core import effects, events
from diloco_broker.core.rules import grants
from diloco_broker.core.state.members import Member
from diloco_broker.core.state.run import RunState
from diloco_broker.core.state.streaming_round import Contribution, Ended, Phase, Round
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.messages import Push


def open_round(state: RunState, round_: Round) -> effects.Effects:
    """Enter the pushes that came too early for this round."""
    state.round = round_
    ledger = state.versions[round_.fragment].ledger
    for member in state.members:
        push = member.deferred.pop(round_.fragment, None)
        if push is not None:
            before = ledger.standing(member.worker_id, push.push_id, push.chunks)
            yield from _enter(state, round_, member, push, before)


def push(state: RunState, round_: Round, member: Member, push: Push) -> effects.Effects:
    """A worker offers a push: take it into the round, or tell it to wait for its own."""
    ledger = state.versions[push.fragment].ledger
    before = ledger.standing(member.worker_id, push.push_id, push.chunks)
    known = round_.contributions.get((member.worker_id, push.push_id))
    if known is not None and known.ended in (Ended.VOIDED, Ended.ABANDONED):
        raise ProtocolError(
            Code.BAD_PUSH, f"This push was {known.ended.value} in round {round_.number}; drop it."
        )
    if known is None:
        yield from _abandon_others(state, round_, member.worker_id, push)
    if before.is_full:
        yield from grants.counted(member, push)
    elif known is not None and (known.ended is None or round_.phase is Phase.OPEN):
        known.ended = None  # the worker is back with the same delta
        yield from _grant(round_, member, known)
    elif _takes_now(round_, member, push):
        yield from _enter(state, round_, member, push, before)
    else:
        number = state.next_round_of(push.fragment)
        if known is not None and known.held.is_full:
            number = round_.number  # all of it is in the round that is closing
        elif number == round_.number:  # its worker has a whole push in there already
            number += state.config.num_fragments
        text = f"Round {round_.number} does not take it; round {number} will."
        yield from grants.wait(member, push, text, number)


def _abandon_others(state: RunState, round_: Round, worker_id: str, push: Push) -> effects.Effects:
    """A worker that comes with another push of the fragment has given up the unfinished ones."""
    for other in list(round_.of_worker(worker_id)):
        same = other.push.fragment == push.fragment
        if same and other.push.push_id != push.push_id and not other.held.is_full:
            yield from step(state, round_, round_.abandon(other))


def _takes_now(round_: Round, member: Member, push: Push) -> bool:
    """Can this new push enter the round that is going on?"""
    if round_.phase is Phase.CLOSING or round_.fragment != push.fragment:
        return False
    # One whole contribution of a worker in a round; a second one belongs to the next.
    return not round_.has_all_of(member.worker_id)


def _enter(
    state: RunState, round_: Round, member: Member, push: Push, before: Bitmap
) -> effects.Effects:
    """Let a new push into the open round. Others of the same worker have been abandoned."""
    if before.is_full:
        yield from grants.counted(member, push)
        return
    staleness = state.versions[push.fragment].staleness(push)
    round_.excused.discard(member.worker_id)
    contribution = round_.begin(member.worker_id, push, before, state.weight_of(push), staleness)
    member.begins(push, round_.number)
    state.totals.pushes += 1
    yield from _grant(round_, member, contribution)


def _grant(round_: Round, member: Member, contribution: Contribution) -> effects.Effects:
    waiting = len(contribution.arrived) - len(contribution.folded)
    push, sharing = contribution.push, len(round_.expected)
    yield from grants.grant(member, push, contribution.held, waiting, sharing, round_.number)


def close_if_due(state: RunState, round_: Round) -> effects.Effects:
    """Begin to close the round if everyone expected has begun; what is ready is stepped at once."""
    ready = round_.close_if_due()
    if ready is not None:
        state.begin_version(round_.fragment, 1)
        yield from step(state, round_, ready)


def step(state: RunState, round_: Round, indexes: list[int]) -> effects.Effects:
    """The outer step of chunks that nobody owes any more."""
    count = state.versions[round_.fragment].gradients - 1
    for index in indexes:
        yield effects.Step(round_.fragment, index, round_.reached[index], count)


def leave(state: RunState, round_: Round, worker_id: str) -> effects.Effects:
    """A worker is gone; what it delivered stays, what it owed is not waited for."""
    yield from step(state, round_, round_.leave(worker_id))


def folded(state: RunState, round_: Round, event: events.Folded) -> effects.Effects:
    """A chunk has been added."""
    work = event.work
    ready = round_.folded((work.worker_id, work.push_id), work.index)
    yield from grants.acknowledge_work(state, work)
    yield from step(state, round_, ready)


def fold_refused(state: RunState, round_: Round, event: events.FoldRefused) -> effects.Effects:
    """A chunk was not finite: the push is void from there on, the round goes on."""
    work = event.work
    key = (work.worker_id, work.push_id)
    is_news = round_.contributions[key].ended is not Ended.VOIDED
    ready = round_.refused(key, work.index)
    if is_news:
        text = (
            f"Chunk {work.index} of the pseudo-gradient of {work.worker_id} has values that are "
            "not finite; the push is void from there on, the round goes on without it."
        )
        yield from grants.refuse(
            state, work.worker_id, work.fragment, work.push_id, Code.NON_FINITE, text
        )
    yield from step(state, round_, ready)
