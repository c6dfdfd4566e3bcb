"""Checkpoints: when one is saved, and how a round continues if its checkpoint cannot be written.

The core makes the record of the run at the end of a round. By the time the loop writes it, the next
round may have opened in the state, though no tensor has changed yet.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from diloco_broker.core import effects, events
from diloco_broker.core.operations import progress
from diloco_broker.core.state import RunState
from diloco_broker.core.versions.fragment import WholeVersion
from diloco_broker.core.versions.record import Resumption, RunRecord

# Seconds until a durable run retries a checkpoint that could not be written.
RETRY_S = 1.0


def run_record(state: RunState, number: int) -> RunRecord:
    """Make the record of the run between two rounds; a complete version counts as released.

    All of it is of the same moment, so a broker that resumes from it continues exactly like this one.
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
    """Load the run of a checkpoint; `seeding` continues it."""
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
        text = "a broker that is restarted with this folder resumes from the newest one"
        yield effects.info(f"Wrote the first checkpoint, {event.path}; {text}.")
    saving.number, saving.saved_at = event.number, state.now
    saving.error = saving.retry_at = None


def save_failed(state: RunState, event: events.SaveFailed) -> effects.Effects:
    """Log that a checkpoint could not be written. Only a durable run waits for it."""
    saving = state.saving
    if state.unreleased is not None:
        saving.retry_at = state.now + RETRY_S
        then = "The round waits for it (--durable); retrying"
    else:
        then = "Training continues; retrying after the next round"
    if saving.error != event.error:
        text = f"The checkpoint before round {event.number} could not be written: {event.error}."
        yield effects.Log("error", f"{text} {then}. Free disk space or repair the folder.")
    saving.error = event.error


def save_soon(state: RunState) -> effects.Effects:
    """Save now, or once the version in progress is complete."""
    assert state.round is not None
    if state.closing:
        state.saving.is_asked = True
    else:
        yield save(state, state.round.number)


def save_if_due(state: RunState, number: int) -> effects.Effects:
    """Save after a round if that is due; `number` is that of the next round."""
    config, saving = state.config, state.saving
    is_due = number % config.save_every == 0 or saving.is_asked or saving.error
    if config.save_dir is not None and is_due and not config.durable:
        saving.is_asked = False
        yield save(state, number)


def save(state: RunState, number: int) -> effects.Save:
    """Write a checkpoint of the current state; `number` is that of the next round."""
    return effects.Save(number, run_record(state, number))


def save_again(state: RunState) -> effects.Effects:
    """Retry the checkpoint that a release waits for, if that is due."""
    retry_at = state.saving.retry_at
    if state.unreleased is not None and retry_at is not None and state.now >= retry_at:
        state.saving.retry_at = None
        yield save(state, state.unreleased.ended.number + 1)
