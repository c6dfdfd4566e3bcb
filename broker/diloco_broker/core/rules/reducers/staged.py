"""The staged reducer in rounds: submissions are kept until whole, and merged together.

Used with a quorum, in deterministic order, or where an aggregate needs whole submissions. A worker may
send before its round is open; what is not whole when a round closes is carried into the next round of
the fragment, or dropped, as the run has it (`--late`), and its worker is told either way.
"""

from __future__ import annotations

from diloco_broker.core import effects, events
from diloco_broker.core.rules import grants
from diloco_broker.core.state.members import Member
from diloco_broker.core.state.run import RunState
from diloco_broker.core.state.staged_round import StagedRound, Submission
from diloco_broker.core.state.streaming_round import Phase
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.messages import Commit, Notice, Push


def open_round(state: RunState, round_: StagedRound) -> effects.Effects:
    """Begin a round with what is in its fragment's pool already."""
    state.round = round_
    yield from enter_deferred(state, round_.fragment)


def enter_deferred(state: RunState, fragment: int) -> effects.Effects:
    """Take pushes that waited for an earlier one of their worker."""
    for member in state.members:
        push = member.deferred.get(fragment)
        if push is not None and not has_whole(state, member, push):
            del member.deferred[fragment]
            yield from begin(state, member, push, state.next_round_of(fragment))


def push(state: RunState, round_: StagedRound, member: Member, push: Push) -> effects.Effects:
    """A worker offers a push: take it into the pool of its fragment."""
    known = state.staging.find(push.fragment, member.worker_id, push.push_id)
    if known is not None:
        yield from resume(state, member, known, _round_of(state, round_, known))
        return
    if state.is_counted(member, push):
        abandon_others(state, member, push)
        yield from grants.counted(member, push)
        return
    if state.config.late == "drop" and _is_late(state, round_, push):
        raise ProtocolError(
            Code.LATE,
            f"The round this push was meant for closed without it (it starts from version "
            f"{push.base.counter if push.base else None}); late work is dropped in this run.",
        )
    abandon_others(state, member, push)
    if has_whole(state, member, push):
        after = state.next_round_of(push.fragment) + state.config.num_fragments
        text = "A push of this worker is in that fragment's coming round; this one is for the next."
        yield from grants.wait(member, push, text, after)
    else:
        yield from begin(state, member, push, state.next_round_of(push.fragment))


def begin(state: RunState, member: Member, push: Push, number: int | None) -> effects.Effects:
    """Give a new push its place in the pool."""
    ledger = state.versions[push.fragment].ledger
    before = ledger.standing(member.worker_id, push.push_id, push.chunks)
    submission = Submission(
        member.worker_id, push, before, state.weight_of(push), progress_at=state.now
    )
    state.staging.pool(push.fragment)[submission.key] = submission
    state.staging.excused_from(push.fragment).discard(member.worker_id)
    member.begins(push, number)
    state.totals.pushes += 1
    yield from resume(state, member, submission, number)


def resume(
    state: RunState, member: Member, submission: Submission, number: int | None
) -> effects.Effects:
    """Tell the worker which chunks are held of its push, and how many it may send now."""
    senders = state.config.staging_slots if state.config.is_async else len(state.members)
    waiting = len(submission.arrived) - len(submission.taken)
    held = submission.held
    yield from grants.grant(member, submission.push, held, waiting, senders, number)


def abandon_others(state: RunState, member: Member, push: Push) -> None:
    """A worker that comes with another push of the fragment has given up the unfinished ones."""
    for other in list(state.staging.pool(push.fragment).values()):
        same = other.worker_id == member.worker_id and other.push.push_id != push.push_id
        if same and not other.is_whole:
            state.staging.drop(other)


def has_whole(state: RunState, member: Member, push: Push) -> bool:
    """Is a whole submission of this worker and fragment waiting to be merged?"""
    round_ = state.round
    assert isinstance(round_, StagedRound)
    return any(
        s.is_whole and s not in round_.chosen
        for s in state.staging.pool(push.fragment).values()
        if s.worker_id == member.worker_id and s.push.push_id != push.push_id
    )


def _is_late(state: RunState, round_: StagedRound, push: Push) -> bool:
    """Has a round of its fragment closed, or begun to, since its base was handed out?"""
    if round_.phase is Phase.CLOSING and round_.fragment == push.fragment:
        return True
    return state.versions[push.fragment].staleness(push) > 0


def _round_of(state: RunState, round_: StagedRound, submission: Submission) -> int:
    return (
        round_.number
        if submission in round_.chosen
        else state.next_round_of(submission.push.fragment)
    )


def leave(state: RunState, round_: StagedRound, worker_id: str) -> None:
    """A worker is gone: what is whole counts, what is not is forgotten."""
    round_.leave(worker_id)
    for submission in list(state.staging):
        if submission.worker_id == worker_id and not submission.is_whole:
            state.staging.drop(submission)


def inspected(state: RunState, event: events.Inspected) -> effects.Effects:
    """A chunk is here and finite."""
    work = event.work
    submission = state.staging.find(work.fragment, work.worker_id, work.push_id)
    if submission is None or work.index not in submission.arrived:
        return  # given up meanwhile; if the same push has begun again, the chunk comes again
    if work.index in submission.taken:
        return
    submission.take(work.index, work.payload, event.squares, state.now)
    yield from grants.acknowledge_work(state, work)


def inspect_refused(state: RunState, event: events.InspectRefused) -> effects.Effects:
    """A chunk was not finite: nothing of its push counts."""
    work = event.work
    submission = state.staging.find(work.fragment, work.worker_id, work.push_id)
    if submission is None or work.index not in submission.arrived:
        return
    state.staging.drop(submission)
    if not state.config.is_async:
        state.staging.excused_from(work.fragment).add(work.worker_id)
    text = (
        f"Chunk {work.index} of the pseudo-gradient of {work.worker_id} has values that are not "
        "finite; nothing of it counts, the run goes on without it."
    )
    yield from grants.refuse(
        state, work.worker_id, work.fragment, work.push_id, Code.NON_FINITE, text
    )


def commit(state: RunState, member: Member, commit: Commit) -> None:
    """Its worker has sent every chunk; some may still be on their way on the other connection."""
    submission = state.staging.find(commit.fragment, member.worker_id, commit.push_id)
    if submission is not None and not submission.is_whole:
        submission.commit(state.now)


def close_if_due(state: RunState, round_: StagedRound) -> effects.Effects:
    """Merge what is whole if it is time to; what is not is carried or dropped."""
    if not round_.close_if_due(state.now):
        return
    for submission in round_.chosen:
        submission.staleness = state.versions[round_.fragment].staleness(submission.push)
    count = state.begin_version(round_.fragment, 1)
    wholes = (tuple(submission.merged() for submission in round_.chosen),)
    for index in range(round_.size):
        yield effects.AggregateAndStep(round_.fragment, index, wholes, count)
    yield from _tell_the_late(state, round_)


def _tell_the_late(state: RunState, round_: StagedRound) -> effects.Effects:
    following = round_.number + state.config.num_fragments
    chosen = {submission.key for submission in round_.chosen}
    late = [s for s in round_.pool.values() if s.key not in chosen]
    for submission in late:
        worker_id, push = submission.worker_id, submission.push
        if state.config.late == "drop" and not submission.is_whole:
            state.staging.drop(submission)
            text = f"Round {round_.number} closed without {worker_id}, whose late push is dropped."
            yield from grants.refuse(state, worker_id, push.fragment, push.push_id, Code.LATE, text)
            continue
        text = f"Round {round_.number} closed without {worker_id}; its push goes into {following}."
        yield effects.Log("info", text)
        member = state.members.named(worker_id)
        if member is not None:
            yield effects.Send(member.control, Notice("carried", text, push.fragment, following))


def released(state: RunState, round_: StagedRound) -> None:
    """What was merged needs no room any more."""
    for submission in round_.chosen:
        state.staging.drop(submission)
