"""Checkpoints: what is saved when, and what becomes of a round whose checkpoint cannot be written.

The core itself takes the record of the run, at the end of a round. By the time the loop carries out what
the core asked for, the next round may have begun in the state, though no tensor has moved yet.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from diloco_broker.core import effects, events
from diloco_broker.core.operations import progress
from diloco_broker.core.state import RunState
from diloco_broker.core.versions.fragment import WholeVersion
from diloco_broker.core.versions.record import Resumption, RunRecord

# How long a release waits before it asks again for a checkpoint that could not be written.
RETRY_S = 1.0


def run_record(state: RunState, number: int) -> RunRecord:
    """How things stand between rounds; a version that is whole and not released yet counts as released.

    Everything in it belongs to that moment: a broker that goes on from it has what this one will have.
    """
    model, unreleased, totals = state.model, state.unreleased, state.totals
    assert model.manifest is not None and model.run is not None
    fragments = {}
    for versions in state.versions.fragments:
        fragment = versions.layout.fragment
        record = versions.current.record if versions.current else None
        if unreleased is not None and unreleased.ended.fragment == fragment:
            record = unreleased.record
        if record is not None:
            fragments[fragment] = replace(record, tags=versions.newest_tags())
    if unreleased is not None:
        totals = progress.with_version(state, unreleased)
    return RunRecord(
        run=model.run,
        number=number,
        epoch=state.epoch,
        manifest=model.manifest,
        plan=model.plan,
        fragments=fragments,
        workers={member.worker_id: member.counters() for member in state.members},
        totals=asdict(totals),
        shards=tuple(state.shards.owners),
        data_sets=state.data.records(),
        term=state.term,
        standby="" if state.standby is None else state.standby.standby,
        left=tuple(state.absences.left),
        missing=state.absences.missing,
    )


def resume(state: RunState, resumption: Resumption) -> None:
    """Load the run of a checkpoint; `seeding` lets it go on."""
    record = resumption.record
    state.model.resume(resumption)
    state.recovery.saved = {
        fragment: WholeVersion(each, resumption.wires[fragment])
        for fragment, each in record.fragments.items()
    }
    state.recovery.restored = dict(state.recovery.saved)
    state.versions.set_layout(resumption.layout.all)
    known = {n: count for n, count in record.totals.items() if n in vars(state.totals)}
    state.totals = replace(state.totals, **known)
    state.totals_before = replace(state.totals)
    state.shards.restore(record.shards)
    state.data.restore(record.data_sets)
    state.absences.restore(record.left, (*record.workers, *record.missing))
    state.term = record.term
    if state.standby is not None:
        state.standby.standby = record.standby
    state.resumed = resumption.title


def saved(state: RunState, event: events.Saved) -> effects.Effects:
    saving = state.saving
    if saving.error is not None:
        yield effects.info(f"Checkpoints are written again; the newest is {event.path}.")
    elif saving.number is None:
        text = "a broker started again with this folder goes on from the newest"
        yield effects.info(f"The first checkpoint is {event.path}; {text}.")
    saving.number, saving.saved_at = event.number, state.now
    saving.error = saving.retry_at = None


def save_failed(state: RunState, event: events.SaveFailed) -> effects.Effects:
    """A checkpoint could not be written. Training goes on, unless the run is durable: then it waits."""
    saving = state.saving
    if state.unreleased is not None:
        saving.retry_at = state.now + RETRY_S
        then = "The round waits for it (--durable) and it is tried again"
    else:
        then = "Training goes on; it is tried again after the next round"
    if saving.error != event.error:
        text = f"The checkpoint before round {event.number} could not be written: {event.error}."
        yield effects.Log("error", f"{text} {then}. Make room, or mend the folder.")
    saving.error = event.error


def save_soon(state: RunState) -> effects.Effects:
    """Save now, or as soon as the version that is being made is whole."""
    assert state.round is not None
    if state.closing:
        state.saving.is_asked = True
    else:
        yield save(state, state.round.number)


def save_if_due(state: RunState, number: int) -> effects.Effects:
    """A round has ended and its version is released; `number` is the next one's."""
    config, saving = state.config, state.saving
    is_due = number % config.save_every == 0 or saving.is_asked or saving.error
    if config.save_dir is not None and is_due and not config.durable:
        saving.is_asked = False
        yield save(state, number)


def save(state: RunState, number: int) -> effects.Save:
    """Write a checkpoint of how things stand now; `number` is the coming round's."""
    return effects.Save(number, run_record(state, number))


def save_again(state: RunState) -> effects.Effects:
    """Time has passed: a release that waits for its checkpoint asks for it again."""
    retry_at = state.saving.retry_at
    if state.unreleased is not None and retry_at is not None and state.now >= retry_at:
        state.saving.retry_at = None
        yield save(state, state.unreleased.ended.number + 1)
