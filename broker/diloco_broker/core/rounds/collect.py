"""Collecting pushes until they are complete, for staged and asynchronous rounds."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

from diloco_broker.core.effects import AggregateAndStep, Effect, Effects
from diloco_broker.core.events import WorkDone, WorkRefused
from diloco_broker.core.members.members import Member
from diloco_broker.core.rounds import grants
from diloco_broker.core.rounds.round import RemoteChunk
from diloco_broker.core.rounds.submissions import Submission
from diloco_broker.core.state import RunState
from diloco_protocol.messages import Commit, Push


def begin(
    state: RunState, member: Member, push: Push, *, sharing: int, number: int | None = None
) -> Effects:
    """Enter a new push into the pool of its fragment. Arguments are as in `grants.grant`."""
    before, weight = state.standing(member, push), state.weight_of(push)
    now = state.run_time
    submission = Submission(member.worker_id, push, before, weight, begun_at=now, progress_at=now)
    state.submissions.pool(push.fragment)[submission.key] = submission
    member.begins(push, number)
    state.totals.pushes += 1
    yield from grants.grant(member, submission, sharing=sharing, number=number)


def is_known(state: RunState, member: Member, push: Push) -> bool:
    """Whether this push is in the pool, or in the current version."""
    is_here = find(state, member.worker_id, push) is not None
    return is_here or state.standing(member, push).is_full


def comes_again(
    state: RunState, member: Member, push: Push, *, sharing: int, number: int | None = None
) -> Generator[Effect, None, bool]:
    """Answer a push that is known (see `is_known`). Returns False for any other."""
    known = find(state, member.worker_id, push)
    if known is not None and known.is_chosen and not known.is_whole:
        text = "A relay lost a part of this push; the rest is being counted, send that part later."
        yield from grants.wait(member, push, text, number)
    elif known is not None:
        if known.is_chosen and number is not None:
            number = known.number
        yield from grants.grant(member, known, sharing=sharing, number=number)
    elif state.standing(member, push).is_full:
        abandon_others(state, member, push)
        yield from grants.counted(member, push)
    else:
        return False
    return True


def abandon_others(state: RunState, member: Member, push: Push) -> None:
    """Drop unfinished pushes of a fragment whose worker offers another one."""
    for other in _others(state, member, push):
        if not (other.is_whole or other.is_chosen):
            state.submissions.drop(other)


def has_whole(state: RunState, member: Member, push: Push) -> bool:
    """Whether another complete submission of this worker and fragment waits to be merged."""
    return any(s.is_whole and not s.is_chosen for s in _others(state, member, push))


def _others(state: RunState, member: Member, push: Push) -> list[Submission]:
    return [
        s
        for s in state.submissions.pool(push.fragment).values()
        if s.worker_id == member.worker_id and s.push.push_id != push.push_id
    ]


def find(state: RunState, worker_id: str, push: Push) -> Submission | None:
    """The submission of this push; None if it was dropped."""
    return state.submissions.find(push.fragment, worker_id, push.push_id)


def done(state: RunState, event: WorkDone) -> Effects:
    work, submission = event.work, _at_work(state, event)
    if submission is not None and work.index not in submission.taken:
        submission.take(work.index, work.payload, event.squares, event.fingerprint, state.run_time)
        yield from grants.acknowledge_work(state, work)


def _at_work(state: RunState, event: WorkDone | WorkRefused) -> Submission | None:
    """The submission that a chunk belongs to; None if that was dropped in the meantime.

    A push that was dropped and has begun again receives the chunk again.
    """
    work = event.work
    submission = state.submissions.find(work.fragment, work.worker_id, work.push_id)
    return submission if submission and work.index in submission.arrived else None


def refused(state: RunState, event: WorkRefused) -> Generator[Effect, None, bool]:
    """A chunk was not finite: drop its push. Returns False if that was done before."""
    work, submission = event.work, _at_work(state, event)
    if submission is None:
        return False
    state.submissions.drop(submission)
    then = "the push is dropped, and the run continues without it"
    yield from grants.refuse_values(state, work, then)
    return True


def commit(state: RunState, member: Member, commit: Commit) -> None:
    """Its worker has sent every chunk; some may still be in flight on the data connection."""
    submission = state.submissions.find(commit.fragment, member.worker_id, commit.push_id)
    if submission is not None and not submission.is_whole:
        submission.commit(state.run_time)


def leave(state: RunState, worker_id: str) -> None:
    """A worker died or left: drop its incomplete submissions; complete ones count.

    A submission that is being merged stays in the pool until its version is released, also if a relay
    lost a part of it: its worker may return first, and sends only that part again.
    """
    for submission in list(state.submissions):
        is_settled = submission.is_whole or submission.is_chosen
        if submission.worker_id == worker_id and not is_settled:
            state.submissions.drop(submission)


def merge(
    state: RunState,
    fragment: int,
    groups: Sequence[Sequence[Submission]],
    factor: Callable[[int], float] = lambda _: 1.0,
) -> Iterator[AggregateAndStep]:
    """Make a version of the fragment; each group makes one gradient.

    `factor` maps the staleness of a submission to the factor of its values.
    """
    versions = state.versions[fragment]
    for submission in (each for group in groups for each in group):
        submission.is_chosen = True
        submission.staleness = versions.staleness(submission.push)
    count = state.begin_version(fragment, len(groups))
    wholes = tuple(tuple(s.merged(factor(s.staleness)) for s in group) for group in groups)
    for index in range(versions.layout.chunks):
        yield AggregateAndStep(fragment, index, wholes, count)


def lost(state: RunState, chunk: RemoteChunk) -> Effects:
    """A relay has lost a chunk: the rest may be counted, and the worker sends the chunk again."""
    submission = chunk.push
    assert isinstance(submission, Submission)
    submission.lose(chunk)
    if submission.is_chosen and submission.key not in state.submissions.in_time:
        state.submissions.in_time.append(submission.key)
    if submission.worker_id not in state.members and not submission.is_chosen:
        state.submissions.drop(submission)
    yield from ()


def forget(state: RunState, merged: Sequence[Submission]) -> None:
    """Drop submissions whose version is released."""
    for submission in merged:
        state.submissions.drop(submission)
