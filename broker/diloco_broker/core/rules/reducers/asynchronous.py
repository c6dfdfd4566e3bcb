"""Asynchronous mode: each submission is an outer step of its own as soon as it is whole.

There is no barrier. A few *slots* bound how many submissions are on their way at a time; the others
wait for their turn with a grant that says so. A slot whose submission makes no progress goes to the next
in line. With a grace window (Liu et al. 2024, arXiv 2401.09135, algorithm 2) the first whole submission
waits for others; those of one fragment are then applied one after the other into one version, so that
all of them get the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

from diloco_broker.core import effects
from diloco_broker.core.rules import grants
from diloco_broker.core.rules.reducers import staged
from diloco_broker.core.state.members import Member
from diloco_broker.core.state.run import RunState
from diloco_broker.core.state.staged_round import StagedRound, Submission
from diloco_broker.core.state.streaming_round import Phase
from diloco_broker.core.state.uploads import Upload
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.messages import Push

WAIT_TEXT = "Others are sending; this push gets its turn when one of them is done."


def push(state: RunState, member: Member, push: Push) -> effects.Effects:
    """A worker offers a push: give it a slot, or let it wait for one."""
    known = state.staging.find(push.fragment, member.worker_id, push.push_id)
    if known is not None:
        yield from staged.resume(state, member, known, None)
        return
    if state.is_counted(member, push):
        staged.abandon_others(state, member, push)
        yield from grants.counted(member, push)
        return
    text = _too_old(state, member.worker_id, push)
    if text is not None:
        raise ProtocolError(Code.STALE, text)
    staged.abandon_others(state, member, push)
    if _may_send(state, member, push) and not state.staging.waiting:
        yield from staged.begin(state, member, push, None)
    else:
        place = (member.worker_id, push.fragment)
        if place not in state.staging.waiting:
            state.staging.waiting.append(place)
        yield from grants.wait(member, push, WAIT_TEXT, None)
        yield from hand_out_slots(state)


def hand_out_slots(state: RunState) -> effects.Effects:
    """Those that wait longest send next."""
    waiting = state.staging.waiting
    for place in list(waiting):
        worker_id, fragment = place
        member = state.members.named(worker_id)
        push = member.deferred.get(fragment) if member else None
        if member is None or push is None:
            waiting.remove(place)  # gone, or back on another connection: it asks again
        elif _may_send(state, member, push):
            waiting.remove(place)
            del member.deferred[fragment]
            text = _too_old(state, worker_id, push)
            if text is not None:
                member.uploads[fragment] = Upload(push, 0)
                yield from grants.refuse(state, worker_id, fragment, push.push_id, Code.STALE, text)
            elif state.is_counted(member, push):
                yield from grants.counted(member, push)
            else:
                yield from staged.begin(state, member, push, None)


def _may_send(state: RunState, member: Member, push: Push) -> bool:
    """Is there a slot, and nothing whole of this worker and fragment waiting to be applied?"""
    # With a grace window whole submissions wait for each other, so they must not fill the slots.
    windowed = state.config.grace > 0
    taken = sum(not (windowed and s.is_whole) for s in state.staging)
    free = taken < state.config.staging_slots
    return free and not staged.has_whole(state, member, push)


def take_back_slots(state: RunState) -> effects.Effects:
    """A submission without progress does not keep others waiting."""
    if not state.staging.waiting:
        return
    for submission in list(state.staging):
        silent = state.now - submission.progress_at
        if submission.is_whole or silent <= state.config.staging_deadline:
            continue
        state.staging.drop(submission)
        worker_id, push = submission.worker_id, submission.push
        yield effects.Log(
            "warning",
            f"The push of {worker_id} made no progress for {silent:.0f} s while others wait; it "
            "starts again when it is its turn.",
        )
        member = state.members.named(worker_id)
        if member is not None:
            grants.void(member, push.fragment, push.push_id)
            state.staging.waiting.append((worker_id, push.fragment))
            yield from grants.wait(member, push, WAIT_TEXT, None)
    yield from hand_out_slots(state)


def apply_if_ready(state: RunState, round_: StagedRound) -> effects.Effects:
    """Apply the submission that has been whole longest, if nothing else is being applied."""
    if round_.phase is Phase.CLOSING:
        return
    whole = list(_young_enough(state))
    yield from _refuse_the_old(state)
    if not whole or state.now - (whole[0].whole_at or 0.0) < state.config.grace:
        return
    fragment = whole[0].push.fragment
    together = [s for s in whole if s.push.fragment == fragment]
    chosen = tuple(together if state.config.grace > 0 else together[:1])
    for submission in chosen:
        submission.staleness = state.versions[fragment].staleness(submission.push)
    round_.set_fragment(fragment, state.versions[fragment].layout.chunks)
    round_.choose(chosen)
    count = state.begin_version(fragment, len(chosen))
    scales = [_scale(state, submission) for submission in chosen]
    wholes = tuple((s.merged(scale),) for s, scale in zip(chosen, scales, strict=True))
    for index in range(round_.size):
        yield effects.AggregateAndStep(fragment, index, wholes, count)


def _young_enough(state: RunState) -> Iterator[Submission]:
    for s in state.staging.whole():
        if _too_old(state, s.worker_id, s.push) is None:
            yield s


def _refuse_the_old(state: RunState) -> effects.Effects:
    """While a submission was on its way others were applied: it may have grown too old."""
    for s in state.staging.whole():
        text = _too_old(state, s.worker_id, s.push)
        if text is not None:
            state.staging.drop(s)
            yield from grants.refuse(
                state, s.worker_id, s.push.fragment, s.push.push_id, Code.STALE, text
            )
            yield from hand_out_slots(state)


def _too_old(state: RunState, worker_id: str, push: Push) -> str | None:
    """Why this push cannot be applied any more; None when it can."""
    limit = state.config.max_staleness
    staleness = state.versions[push.fragment].staleness(push)
    if limit is None or staleness <= limit:
        return None
    return (
        f"The push of {worker_id} starts from parameters {staleness} versions old; this run takes "
        f"at most {limit} (--max-staleness). It is dropped; the worker goes on from the newest."
    )


def _scale(state: RunState, submission: Submission) -> float:
    """What an old submission counts: (1 + s)^-1/2 with `poly`."""
    if state.config.staleness_weight == "poly":
        return float((1 + submission.staleness) ** -0.5)
    return 1.0
