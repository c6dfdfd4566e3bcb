"""Going on with a run that exists: from a checkpoint, from what workers hold, or from both.

Workers outlive a broker that was killed. Each still holds, whole and with its ledger, the version of
each fragment that it received last, and it may be newer than the checkpoint. So before a round opens the
newest version of each fragment is adopted from whoever holds it, one donor after the other, unless the
broker was told to rewind. Lost are the steps of the outer optimizer in between: its momentum is the
checkpoint's, and a buffer of gradients that was applied since is thrown away rather than applied again.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from diloco_broker.core import effects
from diloco_broker.core.rules import branches, donation
from diloco_broker.core.state.members import Member
from diloco_broker.core.state.model_source import Resumption
from diloco_broker.core.state.run import RunState
from diloco_protocol.manifest import summarise
from diloco_protocol.messages import Rejoin


def resume(state: RunState, resumption: Resumption) -> None:
    """Know the run of a checkpoint. It goes on in `seek`, once those ahead of it have been heard."""
    boot = state.bootstrap
    boot.manifest, boot.plan, boot.layout = (
        resumption.manifest,
        resumption.plan,
        resumption.layout,
    )
    state.versions.set_layout(resumption.layout.all)
    boot.run, boot.source = resumption.run, resumption.source
    boot.resumed_number = resumption.number
    boot.restored, boot.saved = dict(resumption.fragments), resumption.fragments
    boot.known = resumption.workers
    for name, value in resumption.totals.items():
        setattr(state.totals, name, value)
    state.totals_before = replace(state.totals)
    state.is_resumed = True


def is_called_for(state: RunState) -> bool:
    """Is there a run to go on with, in a checkpoint or with a worker?"""
    boot = state.bootstrap
    holders = (m for m in state.members if m.worker_id not in boot.rejected_donors)
    return bool(boot.restored) or any(any(member.versions) for member in holders)


def can_do_without(state: RunState, donor: Member) -> bool:
    """Is there somebody else to ask for what this donor was asked for, or something to go on from?"""
    boot = state.bootstrap
    if any(donor.versions):
        return set(boot.restored) >= set(boot.all_fragments) or bool(boot.sources(state.members))
    return bool(boot.candidates(state.members))


def seek(state: RunState) -> effects.Effects:
    """Wait for whoever may be ahead, take from each what is newest with him, then go on."""
    boot = state.bootstrap
    if not boot.source or state.config.recover == "adopt":
        if (yield from _wait_for_others(state)):
            return
        if boot.run is None:
            newest = boot.choose_donor(state.members)
            if newest is None or not any(newest.versions):  # those that hold a version were slow
                boot.ask_all_again()
                newest = boot.choose_donor(state.members)
            assert newest is not None
            boot.run = next(held.run for held in newest.versions if held is not None)
        sources = boot.sources(state.members)
        is_whole = set(boot.restored) >= set(boot.all_fragments)
        if not sources and not is_whole and boot.ask_all_again():
            sources = boot.sources(state.members)
        if sources:
            donor = next(iter(sources.values()))
            boot.ask(donor, tuple(f for f, m in sources.items() if m is donor), state.now)
            whose = ", ".join(
                f"fragment {f} at version {donor.versions[f]}" for f in sorted(boot.wanted)
            )
            ahead = "is ahead of the checkpoint" if boot.source else "has parameters of this run"
            instead = ", not the model file's" if boot.initial is not None else ""
            yield effects.Log(
                "info", f"{donor.worker_id} {ahead}; taking {whose} from it{instead}."
            )
            yield from donation.ask(state, donor)
            return
    if set(boot.restored) >= set(boot.all_fragments):
        yield from _go_on(state)
    else:
        boot.restored.clear()  # nobody has the rest: a new run begins with the next donor
        boot.abandon()
        yield effects.DropInitial()


def _wait_for_others(state: RunState) -> Generator[effects.Effect, None, bool]:
    """True while somebody who may hold a newer version has time left to come back."""
    boot, config = state.bootstrap, state.config
    if boot.source:
        away = sorted(boot.known.keys() - {member.worker_id for member in state.members})
        if not away or state.now >= state.started_at + config.recover_wait:
            boot.waits_for = ""
            return False
        whom = f"workers of the run that may hold newer rounds: {summarise(away)}"
        if not boot.waits_for:
            left = state.started_at + config.recover_wait - state.now
            yield effects.Log(
                "info", f"Before the run goes on, waiting {left:.1f} s at most for {whom}."
            )
        boot.waits_for = whom
        return True
    if len(state.members) >= config.workers:
        return False
    if boot.offered_at is None:
        boot.offered_at = state.now
        holders = [member.worker_id for member in state.members if any(member.versions)]
        for worker_id in holders[:1]:  # none, when those that gave some of it have gone since
            yield effects.Log("info", f"{worker_id} holds a version of an earlier run.")
    return state.now - boot.offered_at < config.recover_wait


def adopted(state: RunState, donor: str) -> effects.Effects:
    """Everything that the donor was asked for is here."""
    boot = state.bootstrap
    before = {fragment: each.gradients for fragment, each in boot.restored.items()}
    steps = boot.adopt()
    size = state.config.dn_size
    # In a grace window a version takes any number of gradients: nobody knows where the buffer stood.
    is_unsure = state.config.is_async and state.config.grace > 0
    for fragment, lost in steps.items():
        had = before.get(fragment, 0)
        if fragment in before and (is_unsure or had // size != (had + lost) // size):
            yield effects.ForgetBuffer(fragment)
    pieces = state.config.num_fragments
    rounds = [
        f"{number} round{'s'[: number != 1]}{f' of fragment {fragment}' if pieces > 1 else ''}"
        for fragment, number in sorted(steps.items())
        if fragment < pieces and number
    ]
    if rounds:
        since = f" since {boot.source}" if boot.source else ""
        yield effects.Log(
            "warning",
            f"Recovered the parameters from {donor}. What the outer optimizer remembered of the rounds"
            f"{since} is lost: {', '.join(rounds)}.",
        )
    yield from seek(state)


def _go_on(state: RunState) -> effects.Effects:
    """Every fragment is at its newest version: the next round opens."""
    boot = state.bootstrap
    for member in state.members:
        if any(held is not None and held.run != boot.run for held in member.versions):
            # It came before anybody knew which run goes on. When it joins again it is told.
            state.members.remove(member)
            state.versions.forget(member.bulk)
            text = f"This broker goes on with run {boot.run}, which is another one; join again."
            yield effects.Send(member.control, Rejoin(state.epoch, text))
    for fragment, restored in boot.restored.items():
        versions = state.versions[fragment]
        versions.tags.update(restored.tags)
        state.versions.install(fragment, restored.version, list(restored.wires), restored.ledger)
        versions.gradients = restored.gradients
        versions.round, versions.averaged = restored.round, restored.averaged
    for member in state.members:
        yield from branches.tell(state, member.worker_id, member.versions)
    number = sum(s.version.counter for s in state.versions.trained if s.version)
    is_newer = number != boot.resumed_number
    source = f"from {boot.source}" if boot.source else "with what its workers hold"
    more = " and what its workers had newer" if boot.source and is_newer else ""
    yield effects.Log("info", f"Run {boot.run} goes on with round {number}, {source}{more}.")
    yield from donation.begin(state, number, is_new=is_newer)
