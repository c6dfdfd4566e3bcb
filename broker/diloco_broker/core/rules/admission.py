"""Workers that come and go: joining, coming back, leaving, dying."""

from __future__ import annotations

from diloco_broker.core import effects
from diloco_broker.core.rules import branches, compatibility, initial_model, rounds
from diloco_broker.core.state.members import MAX_HOST_LENGTH, Member
from diloco_broker.core.state.run import Departure, RunState
from diloco_protocol import messages
from diloco_protocol.errors import Code, ProtocolError, UsageError
from diloco_protocol.manifest import Manifest, differences, summarise

Scalar = str | int | float | None
MAX_EXTRA_LENGTH = 2000  # as text: it is published once a second for each worker
# A worker that was silent for so long is sent a word, so that a broken connection shows itself.
PROBE_AFTER_S = 1.0
# When a connection was closed, each worker is sent a word to find out whose; so many at a time.
PROBES_A_TICK = 64
# Observers send no heartbeats; one that is gone is found out by sending it a word now and then.
PROBE_OBSERVERS_S = 10.0
# After the broker has stood still, a worker whose connection broke has at least so long to come back: it
# tries again every 2 s, and a connection that nothing has answered is given up after 3 s.
BACK_WITHIN_S = 6.0
# How long the answer to "are you alive?" counts when another worker asks for the same id.
CONTEST_S = 30.0


def join(state: RunState, route: effects.Route, join: messages.Join, now: float) -> effects.Effects:
    """A worker asks to take part, for the first time or again on new connections."""
    plan = _check_join(state, join)
    member = state.members.named(join.worker_id)
    if member is not None and member.session != join.session:
        yield from _contest(member, route, now)
        return
    state.bootstrap.forgive(join.worker_id)
    session = state.draw().to_bytes(8, "big") + state.draw().to_bytes(8, "big")
    if member is None:
        member = state.members.admit(join, session, route, now)
        if join.worker_id in state.bootstrap.known:
            member.goes_on_from(state.bootstrap.known[join.worker_id])
        yield effects.Log(
            "info", f"{join.worker_id} joins{f' from {join.host}' if join.host else ''}."
        )
        config = state.config
        remark = compatibility.remark(config, join)
        if remark is not None:
            yield effects.Log("info", remark)
        if config.is_async and len(state.members) > config.workers:
            yield effects.Log(
                "warning",
                f"{len(state.members)} workers are here, the run is planned for {config.workers}: "
                f"the outer optimizer reckons with {config.workers}. Start it with --workers "
                f"{len(state.members)}.",
            )
    else:
        state.versions.forget(member.bulk)
        state.members.renew(member, join, session, route, now)
        yield effects.Log("info", f"{join.worker_id} is back on a new connection.")
    if state.bootstrap.manifest != join.manifest:
        layout = state.bootstrap.settle_manifest(join.manifest, plan, state.run_config)
        state.versions.set_layout(layout.all)
    first_round = _first_round(state, member)
    versions = tuple(each.version for each in state.versions.trained)
    yield from branches.tell(state, join.worker_id, join.versions)
    welcome = messages.Welcome(
        session,
        state.epoch,
        state.run_config,
        first_round,
        state.bootstrap.run if state.bootstrap.is_done else None,
        versions,
        state.feed_address,
        plan if state.config.num_fragments > 1 else (),
    )
    yield effects.Send(route, welcome)
    if any(join.versions) and not state.bootstrap.is_done:
        state.bootstrap.holder_lost_at = None
        donor = state.members.named(state.bootstrap.donor or "")
        is_new_run = donor is not None and not any(donor.versions)
        if is_new_run or state.bootstrap.is_loading:  # a run that exists comes before a new one
            why = f"{join.worker_id} holds a version of a run, which goes on instead of a new one."
            yield from initial_model.abandon_donation(state, why)
            return
    yield from initial_model.seek(state)


def _run_is_settled(state: RunState) -> bool:
    """False while a worker that started afresh gives parameters: an older run may still turn up."""
    boot = state.bootstrap
    donor = state.members.named(boot.donor or "")
    return boot.is_done or bool(boot.restored) or (donor is not None and any(donor.versions))


def _first_round(state: RunState, member: Member) -> int:
    """The first round expected of this worker; it is entered in the open one where that waits."""
    round_ = state.round
    if round_ is None:
        # At least: an estimate that is too high would make the worker leave rounds out.
        return state.bootstrap.resumed_number or 0
    if round_.barrier is None:
        return round_.number  # it says only which fragment to begin with
    if state.below_floor:
        round_.barrier.expect(member.worker_id)
    return round_.number + (member.worker_id not in round_.barrier.expected)


def _check_join(state: RunState, join: messages.Join) -> tuple[int, ...]:
    """Raise ProtocolError unless the worker can take part; returns the fragment of each tensor."""
    if state.stopping is not None:
        what = "restarts" if state.stopping.restarting else "is stopping, for the run is over"
        raise ProtocolError(Code.STOPPING, f"The broker {what}: {state.stopping.reason}.")
    if not messages.is_worker_id(join.worker_id):
        raise ProtocolError(
            Code.BAD_HEADER,
            f"The worker id {join.worker_id!r:.80} must be 1 to {messages.LONGEST_WORKER_ID} printable "
            "characters.",
        )
    for name, pairs in (("extra", join.extra), ("wants", join.wants)):
        if not all(isinstance(value, Scalar) for value in pairs.values()):
            raise ProtocolError(
                Code.BAD_HEADER, f"`{name}` may hold texts, numbers, true, false and nil only."
            )
    if len(join.host) > MAX_HOST_LENGTH or len(str(dict(join.extra))) > MAX_EXTRA_LENGTH:
        raise ProtocolError(
            Code.BAD_HEADER,
            f"`host` may have {MAX_HOST_LENGTH} characters and `extra`, which displays show, "
            f"{MAX_EXTRA_LENGTH}; send less.",
        )
    problems = join.manifest.problems()
    if problems:
        raise ProtocolError(
            Code.MODEL_DIFFERS, f"The model cannot be trained: {summarise(problems)}."
        )
    compatibility.check_wants(state.config, join)
    run = state.bootstrap.run if _run_is_settled(state) else None
    if join.run is not None and run is not None and join.run != run:
        raise ProtocolError(
            Code.RUN_DIFFERS,
            f"The worker belongs to run {join.run}, this broker serves run {run}; restart the "
            "worker to begin from this run's parameters.",
        )
    _check_manifest(state, join.manifest)
    return _plan(state, join.manifest)


def _plan(state: RunState, manifest: Manifest) -> tuple[int, ...]:
    """The fragment of each tensor; raises ProtocolError where the model cannot be split so."""
    if state.bootstrap.manifest == manifest:
        return state.bootstrap.plan
    try:
        return state.plan_of(manifest).numbers(manifest)
    except UsageError as error:
        raise ProtocolError(Code.MODEL_DIFFERS, str(error)) from None


def _check_manifest(state: RunState, manifest: Manifest) -> None:
    boot = state.bootstrap
    nobody_yet = (
        not len(state.members) and not boot.is_done and not boot.is_loading and not boot.restored
    )
    if boot.manifest is not None and boot.manifest != manifest and not nobody_yet:
        clauses = differences(boot.manifest, manifest)
        source = f" (it goes on from {boot.source})" if boot.source else ""
        raise ProtocolError(
            Code.MODEL_DIFFERS,
            f"The worker's model differs from the run's{source}: {summarise(clauses)}.",
        )
    clauses = boot.mismatches(manifest)
    if clauses:
        raise ProtocolError(
            Code.MODEL_DIFFERS,
            f"The worker's model differs from the broker's model file: {summarise(clauses)}.",
        )


def _contest(member: Member, route: effects.Route, now: float) -> effects.Effects:
    """Another worker wants this id: find out whether the one that has it is alive."""
    age = now - member.last_seen
    if member.contested_at is not None and now - member.contested_at > CONTEST_S:
        member.contested_at = None
    is_alive = member.contested_at is not None and member.last_seen > member.contested_at
    if is_alive:
        member.contested_at = None
        text = (
            f"A worker named {member.worker_id!r} is alive on {member.host or 'some host'} "
            f"(pid {member.pid}); give this one another worker_id."
        )
        yield effects.Log("warning", f"Refused a second worker named {member.worker_id!r}.")
    else:
        if member.contested_at is None:
            member.contested_at = now
        text = (
            f"A worker named {member.worker_id!r} was heard {age:.1f} s ago; if it is gone, its "
            "place will be free soon."
        )
        yield effects.Send(member.control, messages.Notice("ping"))
    error = messages.Error(Code.ID_TAKEN, text, retry=not is_alive, about="join")
    yield effects.Send(route, error)


def remove(state: RunState, member: Member, why: str) -> effects.Effects:
    """A worker is gone; what it delivered stays, what it owed is not waited for."""
    state.members.remove(member)
    state.departed = Departure(member.worker_id, why)
    state.versions.forget(member.bulk)
    if state.bootstrap.donor == member.worker_id:
        yield from initial_model.abandon_donation(state)
    yield from rounds.leave(state, member.worker_id)


def evict(state: RunState, member: Member, why: str) -> effects.Effects:
    """A worker counts as dead."""
    state.totals.deaths += 1
    yield effects.Log("warning", f"{member.worker_id} counts as dead: {why}.")
    if any(member.versions) and not state.bootstrap.is_done:
        state.bootstrap.holder_lost_at = state.now
    yield from remove(state, member, why)


def peer_gone(state: RunState, route: effects.Route, now: float) -> effects.Effects:
    """A connection does not exist any more; its worker has a moment to come back."""
    state.versions.forget(route)
    member = state.members.on_route(route)
    if member is not None and member.disconnected_at is None:
        member.disconnected_at = now
        yield effects.Log("info", f"A connection of {member.worker_id} broke.")


def beat(state: RunState, member: Member, beat: messages.Heartbeat) -> effects.Effects:
    """A sign of life, with the step count: a training loop that hangs shows in it."""
    member.hears(beat, state.now)
    if member.warning and not member.has_warned:  # once: what peers say must not fill the log
        member.has_warned = True
        yield effects.Log("warning", f"{member.worker_id} warns: {member.warning}")
    limit = state.config.stall_timeout
    if member.moved_at == state.now:
        yield from rounds.mark_active(state, member)
    elif limit and not member.is_stalled and member.stood_still() > limit:
        member.is_stalled = True
        yield effects.Log(
            "warning",
            f"{member.worker_id} has stood at step {member.step} for {member.stood_still():.0f} s "
            "though it sends heartbeats; the others do not wait for it until it goes on.",
        )
        yield from rounds.stall(state, member.worker_id)


def stood_still(state: RunState, seconds: float) -> effects.Effects:
    """The broker did not run for a while: deadlines have not moved, but connections may have broken."""
    state.back_at = state.now
    own = ", or a step of its torch optimizer took so long" if state.has_own_optimizer else ""
    yield effects.Log(
        "warning",
        f"The broker stood still for {seconds:.0f} s: its process was stopped, or its machine slept or "
        f"was overloaded{own}. That time counts against nobody; workers whose connections broke "
        f"meanwhile have {BACK_WITHIN_S:g} s to come back.",
    )


def _is_given_up(state: RunState, member: Member) -> bool:
    """Has its connection been broken for longer than it may be?"""
    broken = member.disconnected_at
    return (
        broken is not None
        and state.now >= broken + state.config.disconnect_grace
        and not _may_be_on_its_way(state)
    )


def _may_be_on_its_way(state: RunState) -> bool:
    """Has the broker stood still, and so lately that a worker may still be coming back to it?"""
    return state.back_at is not None and state.now < state.back_at + BACK_WITHIN_S


def tick(state: RunState, now: float, lost: bool) -> effects.Effects:
    """Time has passed: who is dead, who should be tried?"""
    if lost:
        due = set(state.to_probe)
        state.to_probe += [
            m.worker_id
            for m in state.members
            if m.disconnected_at is None and m.worker_id not in due
        ]
    for name in state.to_probe[:PROBES_A_TICK]:
        found = state.members.named(name)
        if found is not None:
            yield effects.Send(found.control, messages.Notice("alive"))
    del state.to_probe[:PROBES_A_TICK]
    timeout = state.config.heartbeat_timeout
    for member in state.members:
        silent = now - member.last_seen
        if _is_given_up(state, member):
            yield from evict(state, member, "its connection closed and it did not come back")
        elif timeout and silent > timeout and not _may_be_on_its_way(state):
            yield from evict(state, member, f"nothing was heard of it for {silent:.0f} s")
        elif silent > PROBE_AFTER_S and now - member.probed_at > PROBE_AFTER_S:
            # A dead connection shows only when something is sent on it.
            member.probed_at = now
            yield effects.Send(member.control, messages.Notice("alive"))
    yield from rounds.tick(state)
    for reader in state.versions.observers:
        if now - reader.probed_at > PROBE_OBSERVERS_S:
            reader.probed_at = now
            yield effects.Send(reader.announce, messages.Notice("alive"))
    yield from initial_model.seek(state)
