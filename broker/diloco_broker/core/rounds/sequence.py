"""The sequence of rounds: opening one, stepping, releasing the version.

Round n makes a version of fragment n mod P. All fragments share one sequence: with one for each
fragment, a slow joining worker could make fragments wait for each other. In asynchronous mode a round
applies one submission, or those of one grace period, to their fragment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from diloco_broker.core import effects, events
from diloco_broker.core.data import units
from diloco_broker.core.operations import advice, ending, progress, settings
from diloco_broker.core.rounds import identical, norms
from diloco_broker.core.rounds.modes import rules_of
from diloco_broker.core.rounds.round import Phase, Update
from diloco_broker.core.state import RunState, UnreleasedVersion
from diloco_broker.core.versions import checkpoints
from diloco_broker.core.versions.record import FragmentRecord
from diloco_broker.standby import fence
from diloco_protocol.messages import Notice, Rejoin


def open_round(state: RunState, number: int) -> effects.Effects:
    """Apply pending settings and open a round."""
    yield from settings.take_effect(state)
    yield from advice.look(state, number)
    yield from rules_of(state).open_round(state, number)


def leave(state: RunState, worker_id: str) -> effects.Effects:
    """A worker died or left: rounds no longer wait for it."""
    if state.round is not None:
        yield from rules_of(state).leave(state, worker_id)
    yield from expect_all(state)
    yield from _announce_lack(state, f"{worker_id} is gone. ")


def _announce_lack(state: RunState, cause: str = "") -> effects.Effects:
    """Notify workers, once, that the round is below its floor, and what an operator can do."""
    round_ = state.round
    is_ending = state.stopping is not None or state.ending.is_over or not len(state.members)
    if round_ is None or round_.barrier is None or not state.below_floor or is_ending:
        return
    needed, here = state.floor, len(round_.barrier.expected | round_.participating)
    if round_.is_lack_known or not here:  # no worker waits in it
        return
    if round_.number and state.first_round_pending:
        return  # a resumed run soon continues with fewer
    round_.is_lack_known = True
    option = "--workers" if state.first_round_pending else "--min-workers"
    text = (
        f"{cause}Round {round_.number} waits: it needs {needed} worker{'s'[: needed != 1]} and has "
        f"{here}. To continue with fewer: diloco-broker set {option} N."
    )
    yield effects.warning(text) if cause else effects.info(text)
    for member in state.members:
        yield member.tell(Notice("waiting", text))


def expect_all(state: RunState) -> effects.Effects:
    """A round below its floor expects all workers, also those that joined for a later round."""
    round_ = state.round
    if round_ is None or round_.barrier is None or not state.below_floor:
        return
    for member in state.members:
        if member.worker_id not in round_.barrier.expected and not member.liveness.is_stalled:
            round_.barrier.expect(member.worker_id)
            if state.config.num_fragments > 1:
                text = (
                    f"Round {round_.number} is below its floor and needs this worker; join again."
                )
                yield member.tell(Rejoin(state.epoch, text))


def stall(state: RunState, worker_id: str) -> effects.Effects:
    """A worker stalled: the round no longer waits for it; its delivered chunks count."""
    round_ = state.round
    if round_ is not None and round_.phase is Phase.OPEN:
        if round_.barrier is not None:
            round_.barrier.expect_no_more(worker_id)
        yield from expect_all(state)
        yield from _announce_lack(state, f"{worker_id} stalled. ")


def tick(state: RunState) -> effects.Effects:
    """Handle the deadlines of the mode, the lease, the resumed run, and checkpoints."""
    if state.round is not None:
        yield from rules_of(state).tick(state)
        if not state.below_floor:
            state.round.is_lack_known = False
        yield from _announce_lack(state)
    if state.unreleased is not None and state.unreleased.waits_for_lease:
        yield from _release_with_lease(state, state.unreleased)
    yield from _go_on_with_fewer(state)
    yield from checkpoints.save_again(state)
    yield from ending.tick(state)


def _go_on_with_fewer(state: RunState) -> effects.Effects:
    """A resumed run stops waiting for workers that have not returned within `recover_wait`.

    A run without a closed round waits for all `workers`.
    """
    round_, known = state.round, state.model.known
    if round_ is None or not (round_.number and state.first_round_pending):
        return
    here = {member.worker_id: member.joined_at for member in state.members}
    are_back = bool(known) and known.keys() <= here.keys()
    if here and (are_back or state.run_time - min(here.values()) >= state.config.recover_wait):
        was_due, state.first_round_pending = state.floor, False
        if round_.barrier is not None and len(here) < was_due and state.floor < was_due:
            yield effects.info(f"The run continues with {len(here)} of {was_due} workers.")


def stepped(state: RunState, event: events.Stepped) -> effects.Effects:
    """The outer step of a chunk was taken: send the chunk; the last one completes the version."""
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


def _complete(state: RunState, ended: Update) -> effects.Effects:
    """Every chunk has been stepped: release the version, in a durable run after saving it."""
    versions = state.versions[ended.fragment]
    in_progress = versions.in_progress
    assert in_progress is not None
    counted, ledger = ended.counted(), versions.ledger
    for each in counted:
        ledger = ledger.with_push(each.worker_id, each.push.push_id, each.chunks, each.added)
    ledger = ledger.without_the_long_gone({member.worker_id for member in state.members})
    record = FragmentRecord(
        in_progress.version, ledger, in_progress.gradients, ended.number, ended.averaged
    )
    units.counted(state, ended.fragment, ledger)
    unreleased = UnreleasedVersion(ended, counted, record)
    added = tuple(each for each in counted if each.added)
    yield effects.RecordVersion(
        record.version, versions.version, ended.fragment, ended.number, added
    )
    if state.config.durable:
        state.unreleased = unreleased
        yield checkpoints.save(state, ended.number + 1)
    else:
        yield from _release_with_lease(state, unreleased)


def saved(state: RunState, event: events.Saved) -> effects.Effects:
    """A checkpoint was written: release the version that waited for it."""
    yield from checkpoints.saved(state, event)
    unreleased = state.unreleased
    if unreleased is not None and event.number == unreleased.ended.number + 1:
        yield from _release_with_lease(state, unreleased)


def _release_with_lease(state: RunState, unreleased: UnreleasedVersion) -> effects.Effects:
    """Release a version; a hub with a standby waits for its lease."""
    if fence.may_release(state):
        state.unreleased = None
        yield from _release(state, unreleased)
    else:
        state.unreleased = replace(unreleased, waits_for_lease=True)


def _release(state: RunState, unreleased: UnreleasedVersion) -> effects.Effects:
    """Send the version to all workers, and open the next round."""
    ended = unreleased.ended
    yield from _hand_out(state, unreleased)
    if ended.barrier is not None:
        ended.barrier.end()
    yield from checkpoints.save_if_due(state, ended.number + 1)
    yield from open_round(state, ended.number + 1)
    yield from rules_of(state).released(state)
    units.released(state)
    yield from ending.refuse_the_rest(state)


def _hand_out(state: RunState, unreleased: UnreleasedVersion) -> effects.Effects:
    """Send the version to all workers, and record the round."""
    ended, fragment = unreleased.ended, unreleased.ended.fragment
    for each in unreleased.pushes:
        member = state.members.named(each.worker_id)
        if member is not None:
            member.counts(each.push, each.staleness, state.now)
    before, state.totals = state.totals, progress.with_version(state, unreleased)
    state.versions[fragment].contributions += state.totals.contributions - before.contributions
    counter = unreleased.record.version.counter
    state.last_report = _report(ended, unreleased.pushes, counter, state.run_time)
    state.first_round_pending = False
    progress.show(state, ended.number + 1)
    yield state.last_report
    yield from rules_of(state).tell(state, ended, unreleased.pushes)
    yield from norms.counted(state, unreleased.pushes)
    yield from identical.counted(state, unreleased.pushes)
    yield from ending.look(state, ended.number)
    yield from ending.tell_all(state)  # first: a worker stops training at the last version
    yield from state.versions.release(fragment, unreleased.record)


def _report(
    ended: Update, pushes: Sequence[effects.CountedPush], version: int, now: float
) -> effects.RoundReport:
    whole = [each for each in pushes if each.chunks.is_full]
    losses = [each.push.loss for each in whole if each.push.loss is not None]
    lengths = [each.norm for each in whole if each.norm is not None]
    return effects.RoundReport(
        number=ended.number,
        fragment=ended.fragment,
        version=version,
        seconds=now - ended.opened_at,
        averaged=ended.averaged,
        weight=sum(each.weight for each in whole),
        loss=sum(losses) / len(losses) if losses else None,
        delta_norm=sum(lengths) / len(lengths) if lengths else None,
        staleness=max((each.staleness for each in whole), default=0),
        workers=tuple(each.worker_id for each in pushes),
    )
