"""What a relay does with a round of its site: its mean goes up, and the next one opens.

A round ends for the site once its mean has gone up. That is a *flight*, until a version of the parent's
has it (`passing`), or the parent refuses it. The next round is open then: a push of another fragment may
go up while the first one is on its way, as with any worker. If the site waited for its version instead,
the parent could wait for the site in a later round, and both would wait for ever.

Rounds have the parent's numbers. Where the parent says that a flight is in a later round than it was
meant for, the workers in it are told the same, and do not wait for it. Rounds that are over at the
parent are left out at the site; what has come for them is carried, as at any broker that closes a round
without somebody.
"""

from __future__ import annotations

from diloco_broker.core import effects, events
from diloco_broker.core.operations import ending
from diloco_broker.core.rounds import grants, sequence
from diloco_broker.core.rounds.modes import rules_of
from diloco_broker.core.rounds.round import Phase
from diloco_broker.core.rounds.submissions import StagedUpdate, Submission
from diloco_broker.core.state import Flight, RunState
from diloco_protocol.errors import Code
from diloco_protocol.messages import Notice, Rejoin

PARTLY = "A part of this push is counted already; push what the newest version does not name."


def sent(state: RunState, event: events.SentUp) -> effects.Effects:
    """The mean of the closing round is on its way: the next one opens."""
    ended = state.closing
    assert isinstance(ended, StagedUpdate)
    assert ended.fragment not in state.flights, "two pushes of a fragment are on their way"
    state.flights[ended.fragment] = Flight(ended, event.push, ended.number)
    for each in ended.chosen:
        each.is_up = True
    state.first_round_pending = False
    if ended.barrier is not None:
        ended.barrier.end()
    yield from sequence.open_round(state, _next(state, ended.number + 1))
    yield from rules_of(state).released(state)


def round_named(state: RunState, event: events.RoundNamed) -> effects.Effects:
    """The parent has a flight in this round. Its workers need not wait for it in an earlier one."""
    flight = state.flights.get(event.fragment)
    is_ours = flight is not None and flight.push.push_id == event.push_id
    if flight is None or not is_ours or state.round is None or state.round.barrier is None:
        return
    if event.number > flight.number:
        flight.number = event.number
        for each in flight.update.chosen:
            each.number = event.number
            yield from _carry(state, each, event.number)
    # A round of a fragment is named once the one before it is closing.
    yield from go_on_from(state, event.number - state.config.num_fragments + 1)


def expected_from(state: RunState, event: events.ExpectedFrom) -> effects.Effects:
    """The parent may need the site in a round that was left out here: then its workers join again, as a
    worker does that a round below the floor needs."""
    round_, number = state.round, event.number
    if round_ is None or round_.barrier is None or round_.phase is Phase.CLOSING:
        return
    if number >= round_.number or state.config.num_fragments == 1:
        yield from go_on_from(state, number)
        return
    state.first_open = number
    round_.barrier.end()
    yield from sequence.open_round(state, _next(state, number))
    text = f"Round {number} of the parent needs this site as well; join again."
    for member in state.members:
        yield member.tell(Rejoin(state.epoch, text))


def turned_down(state: RunState, event: events.TurnedDown) -> effects.Effects:
    """The parent refuses a flight. What was refused for the sake of others in it goes up again."""
    flight = state.flights.get(event.fragment)
    if flight is None or flight.push.push_id != event.push_id:
        return
    del state.flights[event.fragment]
    base = flight.push.base
    for each in flight.update.chosen:
        each.is_chosen = each.is_up = False
        if drop_counted(state, each):
            yield from refuse(state, each, Code.CONTAINED, PARTLY)
            continue
        is_fresh = base is None or each.push.base is None or each.push.base.counter > base.counter
        if event.code == Code.CONTAINED or (event.code == Code.STALE and is_fresh):
            each.number = None
            if state.round is not None and state.round.barrier is not None:
                yield from _carry(state, each, state.next_round_of(event.fragment))
        else:
            state.submissions.drop(each)
            yield from refuse(state, each, _code_of(event), event.text)
    if not state.flights:
        yield from ending.refuse_the_rest(state)


def _code_of(event: events.TurnedDown) -> Code:
    """Why the parent refuses a flight. A newer one may have a reason that is not known here: the workers
    go on with the newest version then, as from a base that is too old."""
    return Code(event.code) if event.code in set(Code) else Code.STALE


def drop_counted(state: RunState, submission: Submission) -> bool:
    """Drop a submission of which the newest version names all or a part. Returns whether it does."""
    push, worker_id = submission.push, submission.worker_id
    ledger = state.versions[push.fragment].ledger
    if not ledger.names_any_of({worker_id: push.push_id, **(push.contents or {})}):
        return False
    state.submissions.drop(submission)
    # It has had its turn: with fragments its next push is of another one.
    if state.config.num_fragments > 1:
        state.skip(worker_id, push.fragment)
    member = state.members.named(worker_id)
    if member is not None and ledger.names_any_of({worker_id: push.push_id}):
        member.uploads.void(push.fragment, push.push_id)
    return True


def refuse(state: RunState, submission: Submission, code: Code, text: str) -> effects.Effects:
    """A submission is over; its worker is told so, and no round waits for another of it."""
    push = submission.push
    ledger = state.versions[push.fragment].ledger
    if ledger.names_any_of({submission.worker_id: push.push_id}):
        return  # its worker reads the same ledger
    state.skip(submission.worker_id, push.fragment)
    yield from grants.refuse(state, push.fragment, submission.key, code, text)


def go_on_from(state: RunState, first: int) -> effects.Effects:
    """The rounds before this one are over at the parent: the site leaves them out."""
    round_, pieces = state.round, state.config.num_fragments
    state.first_open = max(state.first_open, first)
    if round_ is None or round_.barrier is None or round_.phase is Phase.CLOSING:
        return
    number = _next(state, round_.number)
    if number == round_.number:
        return
    before = {fragment: state.next_round_of(fragment) for fragment in range(pieces)}
    round_.barrier.end()
    waiting = [each for each in state.submissions if not each.is_chosen]
    yield from sequence.open_round(state, number)
    for each in waiting:
        fragment = each.push.fragment
        now = each.number if each.is_chosen else state.next_round_of(fragment)
        if now is not None and now != before[fragment]:
            yield from _carry(state, each, now)


def paced(state: RunState, event: events.Paced) -> effects.Effects:
    """The fastest worker here makes so many steps to a push, the others fewer."""
    state.asked_steps = event.sync_every
    yield from ()


def _next(state: RunState, number: int) -> int:
    """The first round from this one on that wants a push of the site."""
    if state.round is None or state.round.barrier is None:
        return number
    taken = {flight.number for flight in state.flights.values()}
    number = max(number, state.first_open)
    while number in taken:
        number += 1
    return number


def _carry(state: RunState, submission: Submission, number: int) -> effects.Effects:
    member, fragment = state.members.named(submission.worker_id), submission.push.fragment
    if member is not None:
        text = f"The push of {submission.worker_id} goes into round {number} of the parent."
        yield member.tell(Notice("carried", text, fragment, number))
