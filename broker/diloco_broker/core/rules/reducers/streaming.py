"""The streaming reducer: pushes enter the open round, their chunks are added up as they come.

The default of synchronous mode. Of what has arrived only one accumulator is kept, and the few chunks
that came last. So a push counts chunk by chunk: a round that closes while a worker dies takes what it
has delivered.
"""

from __future__ import annotations

from collections.abc import Iterable

from diloco_broker.core.effects import Effects, Step, nothing
from diloco_broker.core.events import WorkDone, WorkRefused
from diloco_broker.core.rounds.decision import Tally
from diloco_broker.core.rules import grants, round_lines
from diloco_broker.core.state.members import Member
from diloco_broker.core.state.run import RunState
from diloco_broker.core.state.streaming_round import Contribution, Ended, StreamingRound
from diloco_broker.core.state.update import Phase
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.messages import Commit, Push

# Pushes that a worker may begin in one round: each that is given up leaves a record of itself until the
# round ends, which may wait for others for days. A worker that is killed and comes back begins another.
MOST_PUSHES = 32

tell = round_lines.closed
tick = look = released = nothing  # time changes nothing, and nobody waits for room


def _round(state: RunState) -> StreamingRound:
    assert isinstance(state.round, StreamingRound)
    return state.round


def open_round(state: RunState, number: int) -> Effects:
    """Open a round and take in the pushes that came too early for it."""
    fragment, size = state.coming(number)
    barrier = state.open_barrier(fragment)
    round_ = state.round = StreamingRound(number, fragment, size, state.run_time, barrier)
    for member in state.members:
        push = member.take_deferred(fragment)
        if push is not None:
            before = state.standing(member, push)
            yield from _begin(state, round_, member, push, before)


def check(state: RunState, member: Member, push: Push) -> None:
    """Refuse a push that is over, and one more than a worker may begin."""
    round_ = _round(state)
    known = round_.contributions.get((member.worker_id, push.push_id))
    if known is not None and known.ended in (Ended.VOIDED, Ended.ABANDONED):
        text = f"This push was {known.ended.value} in round {round_.number}; drop it."
        raise ProtocolError(Code.BAD_PUSH, text)
    if known is None and sum(1 for _ in round_.of_worker(member.worker_id)) >= MOST_PUSHES:
        text = (
            f"{member.worker_id} has begun {MOST_PUSHES} pushes in round {round_.number} already."
        )
        raise ProtocolError(Code.BAD_PUSH, text)


def offer(state: RunState, member: Member, push: Push) -> Effects:
    """A worker offers a push: take it into the round, or tell it to wait for its own."""
    round_, before = _round(state), state.standing(member, push)
    known = round_.contributions.get((member.worker_id, push.push_id))
    if known is None:
        yield from _abandon_others(state, round_, member.worker_id, push)
    if before.is_full:
        yield from grants.counted(member, push)
    elif known is not None and (known.ended is None or round_.phase is Phase.OPEN):
        known.ended = None  # the worker is back with the same delta
        yield from _grant(round_, member, known)
    elif _takes_now(round_, member, push):
        yield from _begin(state, round_, member, push, before)
    else:
        number = state.next_round_of(push.fragment)
        if known is not None and known.held.is_full:
            number = round_.number  # all of it is in the round that is closing
        elif number == round_.number:  # its worker has a whole push in there already
            number += state.config.num_fragments
        text = f"Round {round_.number} does not take it; round {number} will."
        yield from grants.wait(member, push, text, number)


def _abandon_others(state: RunState, round_: StreamingRound, worker_id: str, push: Push) -> Effects:
    for other in list(round_.of_worker(worker_id)):
        same = other.push.fragment == push.fragment
        if same and other.push.push_id != push.push_id and not other.held.is_full:
            yield from step(state, round_.abandon(other))


def _takes_now(round_: StreamingRound, member: Member, push: Push) -> bool:
    """Can this new push enter the round that is going on? A second whole one belongs to the next."""
    is_its_round = round_.phase is Phase.OPEN and round_.fragment == push.fragment
    return is_its_round and not round_.has_all_of(member.worker_id)


def _begin(
    state: RunState, round_: StreamingRound, member: Member, push: Push, before: Bitmap
) -> Effects:
    """Let a new push into the open round. Others of the same worker have been abandoned."""
    if before.is_full:
        yield from grants.counted(member, push)
        return
    staleness = state.versions[push.fragment].staleness(push)
    round_.barrier.has_begun(member.worker_id)
    contribution = round_.begin(member.worker_id, push, before, state.weight_of(push), staleness)
    member.begins(push, round_.number)
    state.totals.pushes += 1
    yield from _grant(round_, member, contribution)


def _grant(round_: StreamingRound, member: Member, contribution: Contribution) -> Effects:
    sharing = len(round_.barrier.expected)
    yield from grants.grant(member, contribution, sharing=sharing, number=round_.number)


def find(state: RunState, worker_id: str, push: Push) -> Contribution | None:
    contribution = _round(state).contributions.get((worker_id, push.push_id))
    return contribution if contribution and contribution.ended is None else None


def done(state: RunState, event: WorkDone) -> Effects:
    work, round_ = event.work, _round(state)
    assert round_.fragment == work.fragment
    key = (work.worker_id, work.push_id)
    ready = round_.folded(key, work.index, event.squares, event.fingerprint)
    yield from grants.acknowledge_work(state, work)
    yield from step(state, ready)
    if round_.contributions[key].ended is Ended.VOIDED:
        yield from _let_in(state, round_, work.worker_id)


def refused(state: RunState, event: WorkRefused) -> Effects:
    """A chunk was not finite: the push is void from there on, the round goes on."""
    work, round_ = event.work, _round(state)
    assert round_.fragment == work.fragment
    key = (work.worker_id, work.push_id)
    is_news = round_.contributions[key].ended is not Ended.VOIDED
    ready = round_.refused(key, work.index)
    if is_news:
        text = (
            f"Chunk {work.index} of the pseudo-gradient of {work.worker_id} has values that are "
            "not finite or cannot be read; the push is void from there on, the round goes on without it."
        )
        taken = round_.contributions[key].arrived
        yield from grants.refuse(state, work.fragment, key, Code.NON_FINITE, text, taken=taken)
    yield from step(state, ready)
    yield from _let_in(state, round_, work.worker_id)


def _let_in(state: RunState, round_: StreamingRound, worker_id: str) -> Effects:
    """Take a push that waits for the next round because all of an earlier one had come, now void."""
    member = state.members.named(worker_id)
    push = member.deferred.get(round_.fragment) if member else None
    is_settled = all(each.arrived == each.taken for each in round_.of_worker(worker_id))
    if member and push and is_settled and _takes_now(round_, member, push):
        member.take_deferred(round_.fragment)
        yield from _begin(state, round_, member, push, state.standing(member, push))


def commit(state: RunState, member: Member, commit: Commit) -> None:
    """Chunks are counted as they come, so this says nothing new."""


def tally(state: RunState) -> Tally:
    return _round(state).tally()


def close(state: RunState) -> Effects:
    """Begin to close the round; what is ready is stepped at once."""
    round_ = _round(state)
    ready = round_.close()
    state.begin_version(round_.fragment, 1)
    yield from step(state, ready)


def step(state: RunState, indexes: Iterable[int]) -> Effects:
    """The outer step of chunks that nobody owes any more."""
    round_ = _round(state)
    count = state.versions[round_.fragment].gradients - 1
    for index in indexes:
        yield Step(round_.fragment, index, round_.reached[index], count)


def leave(state: RunState, worker_id: str) -> Effects:
    yield from step(state, _round(state).leave(worker_id))


do_without = leave  # each round has contributions of its own
