"""The sequence of rounds: opening one, closing it, stepping, releasing the version.

Round n concerns fragment n mod P. There is one sequence for all fragments: with independent ones a slow
newcomer can make the fragments wait for each other crosswise. In asynchronous mode a round is the
application of one submission (or of those in one grace window), and its fragment is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco_broker.core import effects, events
from diloco_broker.core.rules import (
    checkpoints,
    round_lines,
    settings,
)
from diloco_broker.core.rules.reducers import asynchronous, staged, streaming
from diloco_broker.core.state.members import Member
from diloco_broker.core.state.run import RunState, UnreleasedVersion
from diloco_broker.core.state.run_record import FragmentRecord
from diloco_broker.core.state.staged_round import StagedRound
from diloco_broker.core.state.streaming_round import Counting, Phase, Round
from diloco_protocol.messages import Push, Rejoin


def open_round(state: RunState, number: int) -> effects.Effects:
    """Open a round, with everyone here expected, and enter the pushes that came too early for it."""
    yield from settings.take_effect(state)
    config = state.config
    fragment = number % config.num_fragments
    chunks = state.versions[fragment].layout.chunks
    if config.is_async:
        state.round = StagedRound(number, fragment, chunks, 0, set(), state.now)
    else:
        floor = config.workers if state.first_round_pending else config.min_workers
        expected = {member.worker_id for member in state.members if not member.is_stalled}
        if config.is_staged:
            round_ = StagedRound(
                number,
                fragment,
                chunks,
                floor,
                expected,
                state.now,
                state.staging.pool(fragment),
                state.staging.excused_from(fragment),
                config.quorum,
                config.grace,
            )
            yield from staged.open_round(state, round_)
        else:
            excused = state.staging.excused_from(fragment)
            yield from streaming.open_round(
                state, Round(number, fragment, chunks, floor, expected, state.now, excused)
            )
    yield from close_if_due(state)


def close_if_due(state: RunState) -> effects.Effects:
    """Begin to close the round if it is time to."""
    round_ = state.round
    if round_ is None or state.stopping is not None or state.paused_at is not None:
        return
    if isinstance(round_, Round):
        yield from streaming.close_if_due(state, round_)
    elif state.config.is_async:
        yield from asynchronous.apply_if_ready(state, round_)
    else:
        yield from staged.close_if_due(state, round_)


def leave(state: RunState, worker_id: str) -> effects.Effects:
    """A worker is gone: whoever waited for it waits no longer."""
    round_ = state.round
    if isinstance(round_, Round):
        yield from streaming.leave(state, round_, worker_id)
    elif round_ is not None:
        staged.leave(state, round_, worker_id)
        if state.config.is_async:
            yield from asynchronous.hand_out_slots(state)
    yield from expect_all(state)
    yield from close_if_due(state)


def expect_all(state: RunState) -> effects.Effects:
    """A round that has fallen below its floor needs everybody, also those expected from a later one."""
    round_ = state.round
    if round_ is None or not round_.below_floor:
        return
    for member in state.members:
        if member.worker_id not in round_.expected and not member.is_stalled:
            round_.expected.add(member.worker_id)
            if state.config.num_fragments > 1:
                text = (
                    f"Round {round_.number} lacks workers and needs this one as well; join again."
                )
                yield effects.Send(member.control, Rejoin(state.epoch, text))


def stall(state: RunState, worker_id: str) -> effects.Effects:
    """A worker trains no longer: it is not waited for, what it has sent counts."""
    if state.round is not None and state.round.phase is Phase.OPEN:
        state.round.expected.discard(worker_id)
        yield from expect_all(state)
        yield from close_if_due(state)


def mark_active(state: RunState, member: Member) -> effects.Effects:
    """A worker goes on. One that stood still is expected again: from the next round, or at once
    below the floor."""
    member.moved_at = state.now
    if member.is_stalled:
        member.is_stalled = False
        yield effects.Log("info", f"{member.worker_id} trains again, at step {member.step}.")
        yield from expect_all(state)


def skip_this_round(state: RunState, worker_id: str, push: Push) -> effects.Effects:
    """A push was refused: the others do not wait for its worker in that round."""
    if state.round is not None and not state.config.is_async:
        state.staging.excused_from(push.fragment).add(worker_id)
        yield from close_if_due(state)


def tick(state: RunState) -> effects.Effects:
    """Time has passed: is a window over, has an upload stood still?"""
    if state.round is not None and state.config.is_async:
        yield from asynchronous.take_back_slots(state)
    yield from round_lines.tell(state)
    yield from _go_on_with_fewer(state)
    yield from checkpoints.save_again(state)
    yield from close_if_due(state)


def _go_on_with_fewer(state: RunState) -> effects.Effects:
    """A run that goes on needs its `workers` no more: who has not come back is not waited for.

    A run that has not had a round yet still does.
    """
    round_, known = state.round, state.bootstrap.known
    if round_ is None or not (round_.number and state.first_round_pending):
        return
    here = {member.worker_id: member.joined_at for member in state.members}
    are_back = bool(known) and known.keys() <= here.keys()
    if here and (are_back or state.now - min(here.values()) >= state.config.recover_wait):
        state.first_round_pending = False
        if round_.floor > state.config.min_workers and len(here) < round_.floor:
            yield effects.Log("info", f"Going on with {len(here)} of {round_.floor} workers.")
        round_.floor = min(round_.floor, state.config.min_workers)


def stepped(state: RunState, event: events.Stepped) -> effects.Effects:
    """An outer step was taken: the chunk can be handed out; with the last one, the version."""
    round_ = state.round
    assert round_ is not None and round_.fragment == event.fragment
    round_.stepped.add(event.index)
    if event.overflow:
        yield effects.Log(
            "error",
            f"A gradient of chunk {event.index} in round {round_.number} overflowed and was left out. "
            "A worker sends very large pseudo-gradients.",
        )
    yield from state.versions.chunk_ready(event.fragment, event.index, event.wire)
    if round_.stepped.is_full:
        yield from _complete(state, round_)


def _complete(state: RunState, ended: Round | StagedRound) -> effects.Effects:
    """Every chunk has been stepped: the version is whole. A durable run saves it before it is told."""
    versions = state.versions[ended.fragment]
    in_progress = versions.in_progress
    assert in_progress is not None
    counting = tuple(ended.counting())
    ledger = versions.ledger
    pushes = []
    for each in counting:
        if each.added:
            pushes.append(effects.AuditedPush(each.worker_id, each.push, each.added, each.weight))
        ledger = ledger.with_push(each.worker_id, each.push.push_id, each.chunks)
    ledger = ledger.without_the_long_gone({member.worker_id for member in state.members})
    record = FragmentRecord(
        in_progress.version, ledger, in_progress.gradients, ended.number, ended.averaged
    )
    unreleased = UnreleasedVersion(ended, counting, record)
    yield effects.RecordVersion(
        record.version, versions.version, ended.fragment, ended.number, tuple(pushes)
    )
    if state.config.durable:
        state.unreleased = unreleased
        yield checkpoints.save(state, ended.number + 1)
    else:
        yield from _release(state, unreleased)


def saved(state: RunState, event: events.Saved) -> effects.Effects:
    """A checkpoint is on the disk: a version that waited for it is released."""
    yield from checkpoints.saved(state, event)
    unreleased = state.unreleased
    if unreleased is not None and event.number == unreleased.ended.number + 1:
        state.unreleased = None
        yield from _release(state, unreleased)


def _release(state: RunState, unreleased: UnreleasedVersion) -> effects.Effects:
    """Everybody gets the version, and the next round opens."""
    ended, fragment = unreleased.ended, unreleased.ended.fragment
    for each in unreleased.counting:
        member = state.members.named(each.worker_id)
        if member is not None:
            upload = member.uploads.get(fragment)
            if upload is not None and upload.push.push_id == each.push.push_id:
                upload.is_void = True
            member.merges()
            member.staleness = each.staleness
            member.account.staleness[fragment] = each.staleness
            member.counted_at = state.now
    versions = state.versions[fragment]
    whole = sum(each.chunks.is_full for each in unreleased.counting)
    versions.contributions += whole
    state.totals.contributions += whole
    state.totals.rounds += 1
    counter = unreleased.record.version.counter
    state.last_report = _report(ended, unreleased.counting, counter, state.now)
    state.first_round_pending = False
    yield effects.RecordRound(state.last_report)
    yield from _tell(state, ended, unreleased.counting)
    yield from state.versions.release(fragment, unreleased.record)
    state.staging.excused_from(fragment).clear()
    if isinstance(ended, StagedRound):
        staged.released(state, ended)
    yield from checkpoints.save_if_due(state, ended.number + 1)
    yield from open_round(state, ended.number + 1)
    if state.config.is_async:
        yield from asynchronous.hand_out_slots(state)


def _tell(
    state: RunState, ended: Round | StagedRound, counting: Sequence[Counting]
) -> effects.Effects:
    pieces = state.config.num_fragments
    if not state.config.is_async:
        yield round_lines.closed(ended, counting, pieces, state.now)
        return
    assert state.last_report is not None
    which = f" of fragment {ended.fragment}" if pieces > 1 else ""
    newest = f"version {state.last_report.version}{which}"
    yield from round_lines.add_untold(state, newest, counting)


def _report(
    ended: Round | StagedRound, counting: Sequence[Counting], version: int, now: float
) -> effects.RoundReport:
    whole = [each for each in counting if each.chunks.is_full]
    losses = [each.push.loss for each in whole if each.push.loss is not None]
    norms = [each.push.norm for each in whole if each.push.norm is not None]
    return effects.RoundReport(
        ended.number,
        ended.fragment,
        version,
        now - ended.opened_at,
        ended.averaged,
        sum(each.weight for each in whole),
        sum(losses) / len(losses) if losses else None,
        sum(norms) / len(norms) if norms else None,
        max((each.staleness for each in whole), default=0),
        tuple(each.worker_id for each in counting),
    )
