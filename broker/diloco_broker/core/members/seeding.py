"""Where a broker gets its parameters from: a run that exists, the model file, or a newcomer.

Workers outlive a broker that was killed. Each still holds, whole and with its ledger, the version of
each fragment that it received last, and it may be newer than the checkpoint. So before a round opens the
newest version of each fragment is adopted from whoever holds it, one donor after the other, unless the
broker was told to rewind. Lost are the steps of the outer optimizer in between: its momentum is the
checkpoint's, and a buffer of gradients that was applied since is thrown away rather than applied again.
Where replies are not fp32, only the broker had the master parameters x, and the run goes on from the
values w that workers hold: the residual x - w is lost as well. That of the checkpoint does not replace
it, since later replies have sent what they could of it: in simulations adding it to the adopted w left
the parameters farther from x (by a factor of 1.4 where the two residuals are unrelated), except with
heavy-tailed updates in int4z. A fragment of which no worker has a newer version than the checkpoint
keeps everything.

A new run begins only where nobody has one: with the model file, else with a worker's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace

from diloco_broker.core import effects, events
from diloco_broker.core.members import donation
from diloco_broker.core.members.members import Member
from diloco_broker.core.members.model_source import Intake, Resumption
from diloco_broker.core.operations import progress
from diloco_broker.core.rounds import sequence
from diloco_broker.core.rounds.modes import mode_of
from diloco_broker.core.standby import fence
from diloco_broker.core.state import RunState
from diloco_broker.core.versions import checkpoints
from diloco_protocol import messages
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.dtypes import span_bytes, whole_dtype
from diloco_protocol.errors import Code
from diloco_protocol.manifest import summarise
from diloco_protocol.version import VersionId

# A broker that comes back without a checkpoint may be the second life of one, and its workers on their
# way: they try again every 2 s (protocol/SPECIFICATION.md, section 7), and then join. So long after its
# start parameters that would begin a new run are not taken.
RETURN_WITHIN_S = 3.0


def resume(state: RunState, resumption: Resumption) -> None:
    """Know the run of a checkpoint. It goes on in `seek`, once those ahead of it have been heard."""
    record = resumption.record
    state.model.resume(resumption)
    state.versions.set_layout(resumption.layout.all)
    known = {n: count for n, count in record.totals.items() if n in vars(state.totals)}
    state.totals = replace(state.totals, **known)
    state.totals_before = replace(state.totals)
    state.shards.restore(record.shards)
    state.data.restore(record.data_sets)
    state.absences.restore(record.left, (*record.workers, *record.missing))
    state.parents = resumption.parents
    state.term = record.term
    if state.standby is not None:
        state.standby.lease.standby = record.standby
    state.resumed = resumption.title


def seek(state: RunState) -> effects.Effects:
    """Get parameters if there are none: of a run that exists, else the model file's, else a worker's."""
    model = state.model
    if model.is_done or model.manifest is None:
        return
    if not fence.may_release(state):  # another broker may have the run
        return
    if _waits_to_begin(state):  # there was no lease when the last chunk came
        yield from _begin_run(state)
        return
    if model.donation.is_loading:
        return
    donor = state.members.named(model.donation.donor or "")
    if donor is not None:
        yield from _ask(state, donor)
    elif _is_called_for(state):
        yield from _seek_run(state)
    elif not (yield from _wait_for_a_run(state)):
        if model.initial is not None:
            yield from _load_file(state)
        else:
            yield from _ask_a_newcomer(state)


def _is_called_for(state: RunState) -> bool:
    """Is there a run to go on with, in a checkpoint or with a worker?"""
    model = state.model
    holders = (m for m in state.members if m.worker_id not in model.rejected_donors)
    return bool(model.restored) or any(any(member.versions) for member in holders)


def _seek_run(state: RunState) -> effects.Effects:
    """Wait for whoever may be ahead, take from each what is newest with him, then go on."""
    model = state.model
    if not model.checkpoint or state.config.recover == "adopt":
        if (yield from _wait_for_others(state)):
            return
        if model.run is None:
            newest = model.choose_donor(state.members)
            if newest is None or not any(newest.versions):  # those that hold a version were slow
                model.ask_all_again()
                newest = model.choose_donor(state.members)
            assert newest is not None
            model.run = next(held.run for held in newest.versions if held is not None)
        sources = model.sources(state.members)
        if not sources and not model.is_restored and model.ask_all_again():
            sources = model.sources(state.members)
        if sources:
            donor = next(iter(sources.values()))
            model.ask(donor, tuple(f for f, m in sources.items() if m is donor), state.run_time)
            whose = ", ".join(
                f"fragment {f} at version {donor.versions[f]}"
                for f in sorted(model.donation.wanted)
            )
            has = "is ahead of the checkpoint" if model.checkpoint else "has parameters of this run"
            instead = ", not the model file's" if model.initial is not None else ""
            yield effects.info(f"{donor.worker_id} {has}; taking {whose} from it{instead}.")
            yield from _ask(state, donor)
            return
    if model.is_restored:
        yield from _go_on(state)
    else:
        # Nobody has the rest: a new run begins with the next donor, and not again with a part of this.
        holders = {m.worker_id for m in state.members if any(m.versions)}
        if holders:
            yield effects.warning(
                f"{', '.join(sorted(holders)[:5])} hold a part of run {model.run}, and nobody here has "
                "the rest: a new run begins with the next worker that joins without one, or with these "
                "when they are started afresh."
            )
        model.rejected_donors |= holders
        over = tuple(model.restored)
        model.restored.clear()
        model.abandon()
        yield effects.DropInitial(over)


def _wait_for_others(state: RunState) -> Generator[effects.Effect, None, bool]:
    """True while somebody who may hold a newer version has time left to come back."""
    model, config = state.model, state.config
    if model.checkpoint:
        away = sorted(model.known.keys() - {member.worker_id for member in state.members})
        if not away or state.run_time >= state.recovers_from + config.recover_wait:
            model.waits_for = ""
            return False
        whom = f"workers of the run that may hold newer rounds: {summarise(away)}"
        if not model.waits_for:
            left = state.recovers_from + config.recover_wait - state.run_time
            yield effects.info(f"Before the run goes on, waiting {left:.1f} s at most for {whom}.")
        model.waits_for = whom
        return True
    if len(state.members) >= config.workers:
        return False
    if model.offered_at is None:
        model.offered_at = state.run_time
        holders = [member.worker_id for member in state.members if any(member.versions)]
        for worker_id in holders[:1]:  # none, when those that gave some of it have gone since
            yield effects.info(f"{worker_id} holds a version of an earlier run.")
    return state.run_time - model.offered_at < config.recover_wait


def _wait_for_a_run(state: RunState) -> Generator[effects.Effect, None, bool]:
    """True while a worker that holds a version may be on its way: no new run takes its place."""
    model, config = state.model, state.config
    here = len(state.members)
    until, whom = state.run_time, ""
    if model.holder_lost_at is not None:
        until = model.holder_lost_at + config.recover_wait
        whom = "the worker that holds the run and whose connection broke"
    elif not config.has_new_address and not model.moved_aside:  # their workers would be refused
        enough = here >= config.workers  # more may have been in an earlier run
        until = state.recovers_from + min(
            config.recover_wait, RETURN_WITHIN_S if enough else math.inf
        )
        whom = "workers that may come back with an earlier run"
        whom += "" if enough else f", and for {config.workers} workers to be here"
    if state.run_time >= until:
        whom = ""
    elif whom != model.waits_for:
        text = f"Waiting {until - state.run_time:.1f} s at most for {whom}; then a new run begins."
        yield effects.info(text)
    model.waits_for = whom
    return bool(whom)


def _load_file(state: RunState) -> effects.Effects:
    model = state.model
    model.donation.is_loading = True
    model.run = f"{state.draw():016x}"
    model.donation.wanted = model.all_fragments
    for each in state.versions.fragments:
        chunks = each.layout.chunks
        if chunks:
            version = VersionId(model.run, 0, state.draw())
            intake = Intake(version, [None] * chunks, Bitmap.full(chunks))
            model.donation.intakes[each.layout.fragment] = intake
            for index in range(chunks):
                yield effects.StoreInitial(each.layout.fragment, index)


def _ask_a_newcomer(state: RunState) -> effects.Effects:
    model = state.model
    donor = model.choose_donor(state.members)
    if donor is None and model.ask_all_again():
        donor = model.choose_donor(state.members)
    if donor is not None:
        model.ask(donor, model.all_fragments, state.run_time)
        yield effects.info(f"Asking {donor.worker_id} for its parameters.")
        yield from _ask(state, donor)


def _ask(state: RunState, donor: Member) -> effects.Effects:
    """Ask the donor for what is needed; again on a new connection, another one if it is silent."""
    model = state.model
    if state.run_time - model.donation.progress_at > model.patience_s:
        yield from _pass_over(state, donor)
    elif model.donation.asked != donor.session:
        model.donation.asked = donor.session
        for fragment in model.donation.wanted:
            text = "The broker needs the parameters of this worker; send them."
            yield donor.tell(messages.Notice("donate", text, fragment))


def _pass_over(state: RunState, donor: Member) -> effects.Effects:
    """A donor delivers nothing: another one is asked. Where there is none, it gets more time."""
    model = state.model
    slow = f"{donor.worker_id} has sent no parameters for {model.patience_s:g} s"
    model.passed_over.add(donor.worker_id)
    if _can_do_without(state, donor):
        yield effects.warning(f"{slow}; going on without it.")
        yield from abandon_donation(state, why="The broker asks another worker meanwhile.")
    else:
        model.ask_all_again()
        model.donation.progress_at = state.run_time
        yield effects.warning(f"{slow}, and no other worker has them; waiting for it.")


def _can_do_without(state: RunState, donor: Member) -> bool:
    """Is there somebody else to ask for what this donor was asked for, or something to go on from?"""
    model = state.model
    if any(donor.versions):
        return model.is_restored or bool(model.sources(state.members))
    return bool(model.candidates(state.members))


def stored(state: RunState, event: events.InitialStored) -> effects.Effects:
    """A chunk of the first version is in place; with the last of all the first round opens."""
    yield from donation.stored(state, event)
    model = state.model
    if not model.donation.is_complete:
        return
    push = model.donation.intakes[event.work.fragment].push
    if push is not None and push.base is not None:
        yield from _adopt(state, event.work.worker_id)
    elif _waits_to_begin(state) and fence.may_release(state):  # else `seek` begins it later
        yield from _begin_run(state)


def _waits_to_begin(state: RunState) -> bool:
    """Are the parameters of a new run whole? A relay's are its parent's affair."""
    donation = state.model.donation
    is_old = any(i.push is not None and i.push.base is not None for i in donation.intakes.values())
    return bool(donation.wanted) and donation.is_complete and not is_old and state.gate is None


def _begin_run(state: RunState) -> effects.Effects:
    model = state.model
    source = model.donation.donor or "the model file"
    for fragment, intake in model.donation.intakes.items():
        intake.name_by_content()
        state.versions.install(fragment, intake.whole())
        yield effects.RecordVersion(intake.version, None, fragment, 0)
    yield effects.info(f"Run {model.run} begins with the parameters of {source}.")
    yield from _begin(state, 0, is_new=True)


def _adopt(state: RunState, donor: str) -> effects.Effects:
    model = state.model
    before = {fragment: each.record.gradients for fragment, each in model.restored.items()}
    size = state.config.dn_size
    steps = model.adopt(size)
    # Where a version takes any number of gradients, nobody knows where the buffer stood.
    is_unsure = mode_of(state.config).takes_any_number(state.config)
    for fragment, lost in steps.items():
        had = before.get(fragment, 0)
        if fragment in before and (is_unsure or had // size != (had + lost) // size):
            yield effects.ForgetBuffer(fragment)
    pieces = state.config.num_fragments
    sequence = [
        f"{number} round{'s'[: number != 1]}{f' of fragment {fragment}' if pieces > 1 else ''}"
        for fragment, number in sorted(steps.items())
        if fragment < pieces and number
    ]
    if sequence:
        since = f" since {model.checkpoint}" if model.checkpoint else ""
        yield effects.warning(
            f"Recovered the parameters from {donor}. What the outer optimizer remembered of the rounds"
            f"{since} is lost: {', '.join(sequence)}.{_residual_lost(state)}"
        )
    yield from seek(state)


def _residual_lost(state: RunState) -> str:
    """What adopting a version loses beside the outer optimizer's state: a sentence, or nothing."""
    reply = state.config.reply_dtype
    if reply == "fp32":
        return ""
    return (
        f" What replies in {reply} left out of the parameters is lost as well: the run goes on from the "
        "values that workers hold."
    )


def _go_on(state: RunState) -> effects.Effects:
    model = state.model
    for member in state.members:
        if any(held is not None and held.run != model.run for held in member.versions):
            # It came before anybody knew which run goes on. When it joins again it is told.
            state.members.remove(member)
            state.versions.forget(member.bulk)
            text = f"This broker goes on with run {model.run}, which is another one; join again."
            yield member.tell(messages.Rejoin(state.epoch, text))
    for fragment, restored in model.restored.items():
        state.versions.install(fragment, restored)
    for member in state.members:
        yield from tell_of_branches(state, member.worker_id, member.versions)
    number = sum(s.version.counter for s in state.versions.trained if s.version)
    if state.is_site:  # its versions may be of different moments; rounds are the parent's
        number = model.resumed_number or 0
    is_newer = number != model.resumed_number
    source = f"from {model.checkpoint}" if model.checkpoint else "with what its workers hold"
    more = " and what its workers had newer" if model.checkpoint and is_newer else ""
    yield effects.info(f"Run {model.run} goes on with round {number}, {source}{more}.")
    yield from _begin(state, number, is_new=is_newer)


def tell_of_branches(
    state: RunState, worker_id: str, versions: Sequence[VersionId | None]
) -> effects.Effects:
    """Say it if a worker holds a version, by fragment, that this broker's rounds do not come from.

    A broker that comes back from an older copy, or before a worker that was ahead of it, makes rounds
    that were made already, with other contributions. Counters then say the same and tags differ. Nothing
    can join the two again: the broker's branch is the run.
    """
    fragments = state.versions.trained
    for fragment, (held, each) in enumerate(zip(versions, fragments, strict=False)):
        ours = each.version
        if held is None or ours is None or held.run != ours.run:
            continue
        which = f" of fragment {fragment}" if len(fragments) > 1 else ""
        if held.counter > ours.counter:
            yield effects.warning(
                f"{worker_id} holds version {held}{which}, but this broker went on from an older copy "
                f"and is at {ours}. The rounds that only {worker_id} has are lost, except for what "
                "workers offer again."
            )
        elif each.is_of_another_branch(held):
            yield effects.warning(
                f"{worker_id} holds version {held}{which}, which is of another branch of run "
                f"{ours.run}: this broker, now at {ours}, has version {each.name_of(held.counter)} "
                f"instead, because a broker went on from an older copy. The rounds that only "
                f"{worker_id} has are lost; it goes on with this broker's parameters, and offers "
                "again what it has not seen counted."
            )


def _begin(state: RunState, number: int, *, is_new: bool) -> effects.Effects:
    """Every fragment has a version: readers get it, and a round opens. `is_new`: it is not saved."""
    state.model.finish()
    progress.show(state, number)
    yield from _tell_of_room(state)
    yield from state.versions.serve_waiting()
    if is_new and state.config.save_dir is not None:
        yield checkpoints.save(state, number)
    yield from sequence.open_round(state, number)


def _tell_of_room(state: RunState) -> effects.Effects:
    """What keeping whole submissions costs, said at the start."""
    config, layouts = state.config, [each.layout for each in state.versions.trained]
    mode = mode_of(config)
    if mode.room_needed is None:
        return
    sizes = [sum(span_bytes(span, config.wire_dtype) for span in part.spans) for part in layouts]
    many, whose, size = mode.room_needed(config, sizes)
    yield effects.info(
        f"{mode.asked_for_by(config)} needs whole submissions: up to {many} "
        f"{whose}{'s'[: many != 1]} x {_megabytes(size)} of memory beyond parameters and momentum."
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def refused(state: RunState, event: events.InitialRefused) -> effects.Effects:
    """A donation has values that cannot be used: ask another worker."""
    work = event.work
    names = summarise(state.versions[work.fragment].layout.names_in(work.index))
    text = (
        f"The parameters of {work.worker_id or 'the model file'} are not all finite in "
        f"{whole_dtype(state.config.reply_dtype)}, in {names}; they cannot begin a run."
    )
    yield effects.Log("error", text)
    donor = state.members.named(work.worker_id)
    if donor is not None:
        error = messages.Error(Code.NON_FINITE, text, push_id=work.push_id, about="push")
        yield donor.tell(error)
        yield from reject_donor(state, donor)


def reject_donor(state: RunState, donor: Member) -> effects.Effects:
    """What this worker donates cannot be used: it is not asked again."""
    if state.model.donation.donor == donor.worker_id:
        state.model.rejected_donors.add(donor.worker_id)
        yield from abandon_donation(state)


def abandon_donation(state: RunState, why: str = "") -> effects.Effects:
    """The donor cannot go on, or need not (`why`): ask the next."""
    yield from donation.abandon(state, why)
    yield from seek(state)
