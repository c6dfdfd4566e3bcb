"""Admission: workers that join, reconnect, leave, or are removed."""

from __future__ import annotations

from dataclasses import replace

from diloco_broker.core import effects, events
from diloco_broker.core.data import units
from diloco_broker.core.members import compatibility, room, seeding
from diloco_broker.core.members.members import MAX_HOST_LENGTH, Member
from diloco_broker.core.operations import ending, orders
from diloco_broker.core.relays import terms
from diloco_broker.core.rounds import sequence
from diloco_broker.core.rounds.modes import mode_of
from diloco_broker.core.state import Departure, RunState
from diloco_broker.standby import fence
from diloco_protocol import messages
from diloco_protocol.errors import Code, ProtocolError, UsageError
from diloco_protocol.fragments import FragmentPlan
from diloco_protocol.manifest import Manifest, differences, summarise
from diloco_protocol.roles import Role

Scalar = str | int | float | None
MAX_EXTRA_LENGTH = 2000  # characters: it is published each second for each worker
# Seconds for which a ping of a worker is valid evidence when another one asks for its id.
CONTEST_S = 30.0


def join(
    state: RunState,
    route: effects.Route,
    join: messages.Join,
    manifest: Manifest,
    plan: tuple[int, ...] | None = None,
) -> effects.Effects:
    """Admit a worker, or a member on a new connection.

    `plan` is the result of the user's split function, once that was called.
    """
    manifest = state.model.as_known(manifest)
    _check_sound(state, join, manifest)
    _check_fit(state, join, manifest)
    plan = _plan(state, manifest) if plan is None else plan
    member = state.members.named(join.worker_id)
    if plan is None:
        yield effects.SplitModel(route, join, manifest)
    elif member is not None and not member.comes_back_as(join):
        yield from _contest(member, route, state.now)
    else:
        # Ignore versions of fragments that the run does not have; it has one frozen fragment more.
        known = join.versions[: state.config.num_fragments + 1]
        yield from _let_in(state, route, replace(join, versions=known), manifest, plan)


def _let_in(
    state: RunState,
    route: effects.Route,
    join: messages.Join,
    manifest: Manifest,
    plan: tuple[int, ...],
) -> effects.Effects:
    member = state.members.named(join.worker_id)
    session = state.draw().to_bytes(8, "big") + state.draw().to_bytes(8, "big")
    if member is None:
        member = state.members.admit(join, session, route, state.now, state.run_time)
        yield from _is_new(state, member, join)
    else:
        state.versions.forget(member.bulk)
        state.members.renew(member, join, session, route, state.now)
        yield effects.info(f"{join.worker_id} reconnected.")
    member.relay = state.relays.before(route)
    if state.model.manifest != manifest:
        layout = state.model.settle_manifest(manifest, plan, state.run_config, join.digest)
        state.versions.set_layout(layout.all)
        yield from terms.tell_all(state)
    first_round = _first_round(state, member)
    yield from state.versions.warn_of_branches(join.worker_id, join.versions)
    yield effects.Send(route, _welcome(state, member, first_round, plan))
    yield from ending.tell(state, member)
    yield from orders.tell(state, member)
    yield from seeding.joined(state, member)


def _is_new(state: RunState, member: Member, join: messages.Join) -> effects.Effects:
    config = state.config
    state.absences.joined(member)
    if join.worker_id in state.model.known:
        member.goes_on_from(state.model.known[join.worker_id])
    yield effects.info(f"{join.worker_id} joins{f' from {join.host}' if join.host else ''}.")
    remark = compatibility.remark(config, join)
    if remark is not None:
        yield effects.info(remark)
    if not mode_of(config).has_rounds and len(state.members) > config.workers:
        yield effects.warning(
            f"{len(state.members)} workers joined, but the outer optimizer is set up for "
            f"{config.workers}; start the broker with --workers {len(state.members)}."
        )


def _welcome(
    state: RunState, member: Member, first_round: int, plan: tuple[int, ...]
) -> messages.Welcome:
    shard, num_shards = state.shards.slot(member.worker_id, state.config.workers)
    around, is_direct = state.surroundings, member.relay is None
    return messages.Welcome(
        session=member.session,
        epoch=state.epoch,
        config=state.run_config,
        first_round=first_round,
        run=state.model.run if state.is_running else None,
        versions=tuple(each.version for each in state.versions.trained),
        feed=around.feed_address,
        plan=plan if state.config.num_fragments > 1 else (),
        shard=shard,
        num_shards=num_shards,
        ipc=around.own_address if is_direct else None,
        bound=around.bound if is_direct and around.own_address is not None else None,
        term=state.term,
        lease=None if state.standby is None else state.standby.seconds,
    )


def _first_round(state: RunState, member: Member) -> int:
    """The first round that waits for this worker: the open one if that is below its floor."""
    round_ = state.round
    if round_ is None:
        # A lower bound: with a number that is too high the worker would skip rounds.
        return state.model.resumed_number or 0
    if round_.barrier is None:
        return round_.number  # it only determines the first fragment
    if state.below_floor:
        round_.barrier.expect(member.worker_id)
    return round_.number + (member.worker_id not in round_.barrier.expected)


def _check_sound(state: RunState, join: messages.Join, manifest: Manifest) -> None:
    """Raise ProtocolError for a worker that no run of this broker could admit."""
    if state.stopping is not None:
        what = "restarts" if state.stopping.restarting else "is stopping because the run is over"
        raise ProtocolError(Code.STOPPING, f"The broker {what}: {state.stopping.reason}.")
    if not messages.is_worker_id(join.worker_id):
        raise ProtocolError(
            Code.BAD_HEADER,
            f"The worker id {join.worker_id!r:.80} must be 1 to {messages.LONGEST_WORKER_ID} printable "
            "characters.",
        )
    for name, pairs in (("extra", join.extra), ("wants", join.wants)):
        if not all(isinstance(value, Scalar) for value in pairs.values()):
            text = f"The values of `{name}` must be strings, numbers, booleans or nil."
            raise ProtocolError(Code.BAD_HEADER, text)
    if len(join.host) > MAX_HOST_LENGTH or len(str(dict(join.extra))) > MAX_EXTRA_LENGTH:
        raise ProtocolError(
            Code.BAD_HEADER,
            f"`host` may have at most {MAX_HOST_LENGTH} characters, `extra` at most {MAX_EXTRA_LENGTH}.",
        )
    fence.check_join(state)
    room.check_number(state, join)
    if not 1 <= join.processes <= messages.MOST_PROCESSES:
        text = f"`processes` must be 1 to {messages.MOST_PROCESSES}, got {join.processes}."
        raise ProtocolError(Code.BAD_HEADER, text)
    unsound = [version for version in join.versions if version and not version.is_valid]
    if unsound:
        text = f"The worker claims an invalid version, {unsound[0]!r:.200}."
        raise ProtocolError(Code.BAD_HEADER, text)
    problems = manifest.problems()
    if problems:
        text = f"The model cannot be trained: {summarise(problems)}."
        raise ProtocolError(Code.MODEL_DIFFERS, text)


def _check_fit(state: RunState, join: messages.Join, manifest: Manifest) -> None:
    """Raise ProtocolError for a worker that does not fit the run."""
    compatibility.check_wants(state.config, join)
    if join.run in state.model.moved_aside:
        raise ProtocolError(
            Code.RUN_DIFFERS,
            f"The worker belongs to run {join.run}, which --fresh moved aside; restart the worker to "
            "join the new run.",
        )
    run = state.model.run if seeding.run_is_settled(state) else None
    if join.run is not None and run is not None and join.run != run:
        raise ProtocolError(
            Code.RUN_DIFFERS,
            f"The worker belongs to run {join.run}, this broker serves run {run}; restart the "
            "worker to begin from this run's parameters.",
        )
    _check_manifest(state, manifest)


def _plan(state: RunState, manifest: Manifest) -> tuple[int, ...] | None:
    """The fragment of each tensor; None if the user's function has to compute it.

    Raises ProtocolError if the model cannot be split.
    """
    if state.model.manifest == manifest:
        return state.model.plan
    if state.surroundings.has_own_split:
        return None
    config, pieces = state.config, state.config.num_fragments
    try:
        return FragmentPlan.of(manifest, pieces, config.fragment_pattern).numbers(manifest)
    except UsageError as error:
        raise ProtocolError(Code.MODEL_DIFFERS, str(error)) from None


def _check_manifest(state: RunState, manifest: Manifest) -> None:
    model = state.model
    is_settled = len(state.members) or seeding.manifest_is_settled(state)
    if model.manifest is not None and model.manifest != manifest and is_settled:
        clauses = differences(model.manifest, manifest)
        text = f"The worker's model differs from the run's: {summarise(clauses)}."
        if state.resumed:
            text += (
                f" The broker resumed {state.resumed}; to begin a new run, start it with --fresh or "
                "another --save-dir."
            )
        raise ProtocolError(Code.MODEL_DIFFERS, text)
    clauses = [] if model.initial is None else model.initial.mismatches(manifest)
    if clauses:
        text = f"The worker's model differs from the broker's model file: {summarise(clauses)}."
        raise ProtocolError(Code.MODEL_DIFFERS, text)
    if model.manifest != manifest:
        room.check_size(state, manifest)


def _contest(member: Member, route: effects.Route, now: float) -> effects.Effects:
    """Another worker asks for this id: find out whether the current one is alive."""
    liveness, figures = member.liveness, member.figures
    age = now - liveness.last_seen
    if liveness.contested_at is not None and now - liveness.contested_at > CONTEST_S:
        liveness.contest(None)
    is_alive = liveness.contested_at is not None and liveness.last_seen > liveness.contested_at
    if is_alive:
        liveness.contest(None)
        text = (
            f"A worker named {member.worker_id!r} is alive on {figures.host or 'some host'} "
            f"(pid {figures.pid}); give this one another worker_id."
        )
        yield effects.warning(f"Refused a second worker named {member.worker_id!r}.")
    else:
        if liveness.contested_at is None:
            liveness.contest(now)
        text = (
            f"A worker named {member.worker_id!r} sent a message {age:.1f} s ago; if it is dead, the id "
            "will be free soon."
        )
        yield member.tell(messages.Notice("ping"))
    error = messages.Error(Code.ID_TAKEN, text, retry=not is_alive, about="join")
    yield effects.Send(route, error)


def remove(state: RunState, member: Member, why: str) -> effects.Effects:
    """Remove a worker: what it delivered counts, and rounds stop waiting for the rest."""
    state.members.remove(member)
    state.shards.leave(member.worker_id)
    orders.gone(state, member.worker_id)
    state.departed = Departure(member.worker_id, why)
    state.versions.forget(member.bulk)
    yield from seeding.removed(state, member)
    yield from sequence.leave(state, member.worker_id)
    units.leave(state, member.worker_id)


def kick(state: RunState, member: Member) -> effects.Effects:
    """Remove a worker at the request of an operator, and notify it."""
    text = f"{member.worker_id} was removed from the run by an operator."
    yield member.tell(messages.Notice("kicked", text))
    yield from remove(state, member, "an operator removed it")
    state.absences.left_properly(member)


def revoked(state: RunState, event: events.KeysRevoked) -> effects.Effects:
    """Keys were revoked: remove the workers that use them."""
    for peer in sorted(event.peers, key=str):
        yield effects.warning(f"The key of {peer} was revoked.")
        member = state.members.named(peer.name) if peer.role is Role.WORKER else None
        if member is not None:
            yield from remove(state, member, "its key was revoked")
            state.absences.left_properly(member)


def leave(state: RunState, member: Member, message: messages.Leave) -> effects.Effects:
    why = message.reason[:200]
    yield effects.info(f"{member.worker_id} leaves: {why or 'it is done'}.")
    if not any(member.worker_id in each.ledger.pushes for each in state.versions.trained):
        yield effects.warning(
            f"{member.worker_id} left without having closed a round: the run has none of its steps."
        )
    fence.left(state, member)
    yield from remove(state, member, why)
    if not why:
        state.absences.left_properly(member)
    elif member.has_trained:
        state.absences.died(member, why, state.now)
    else:
        state.absences.will_return(member)
