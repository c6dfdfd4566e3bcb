"""Seeding: how a broker without parameters gets them, as transitions of `Start`.

    WAITING_FOR_WORKERS, WAITING_FOR_HOLDERS
        -> ADOPTING -> WAITING_FOR_HOLDERS    while a worker holds a newer version than the broker
        -> RUNNING                            a run exists, and the broker has its newest versions
        -> LOADING_FILE -> RUNNING            a new run, from the model file
        -> SEEDING -> RUNNING                 a new run, from the parameters of a worker

A failed upload leads back to waiting. No version is released before all fragments are complete.

Workers survive a broker that was killed. Each still has the last version of each fragment that it
received, complete and with its ledger, and it may be newer than the checkpoint. So before a round opens,
the broker adopts the newest version of each fragment from the worker that holds it, one worker at a
time, unless it was started to rewind. The outer optimizer's steps in between are lost: its momentum is
the checkpoint's, and a buffer of gradients that was applied since is dropped rather than applied again.
If replies are not fp32, only the broker had the master parameters x, and the run continues from the
values w that workers hold: the residual x - w is lost as well. The checkpoint's residual is not used
instead, since later replies have sent a part of it: in simulations, adding it to the adopted w left the
parameters farther from x (by a factor of 1.4 if the two residuals are unrelated), except with
heavy-tailed updates in int4z. A fragment of which no worker has a newer version than the checkpoint
loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence

from diloco_broker.core import effects, events
from diloco_broker.core.members import room
from diloco_broker.core.members.members import Member
from diloco_broker.core.members.start import SEED_PATIENCE_S, FirstVersion, Seeding, Start
from diloco_broker.core.operations import progress
from diloco_broker.core.rounds import sequence
from diloco_broker.core.rounds.modes import mode_of
from diloco_broker.core.rounds.uploads import Upload, Window, first_window, upload_window
from diloco_broker.core.state import RunState
from diloco_broker.core.versions import checkpoints
from diloco_broker.standby import fence
from diloco_protocol import messages
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.dtypes import whole_dtype
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.manifest import summarise
from diloco_protocol.version import Ledger, VersionId

# Seconds in which a broker without a checkpoint starts no new run: it may have been restarted, and its
# workers retry every 2 s (docs/specification.md, section 7) until they rejoin.
RETURN_WITHIN_S = 3.0


# Workers that join, die or leave.


def joined(state: RunState, member: Member) -> effects.Effects:
    """A worker joined or reconnected. If it holds a version, that run continues instead of a new one."""
    seeding = state.seeding
    if any(member.versions):
        state.recovery.holder_lost_at = None
    if any(member.versions) and state.start in (Start.SEEDING, Start.LOADING_FILE):
        why = f"{member.worker_id} holds a version of a run, which continues instead of a new one."
        yield from abandon(state, why)
    elif member.worker_id == seeding.worker_id:
        held = dict(enumerate(member.versions))
        if all(held.get(fragment) == version for fragment, version in seeding.wanted.items()):
            yield from _notify(state, member)
        else:
            yield from abandon(state)
    yield from advance(state)


def lost(state: RunState, member: Member) -> None:
    """A worker died. If it holds a version that may be needed, give it time to rejoin."""
    if any(member.versions) and not state.is_running:
        state.recovery.holder_lost_at = state.run_time


def removed(state: RunState, member: Member) -> effects.Effects:
    """A worker was removed: abandon its upload. Without workers, forget a model without parameters."""
    if state.seeding.worker_id == member.worker_id:
        yield from abandon(state)
        yield from advance(state)
    if not len(state.members) and not manifest_is_settled(state):
        state.model.forget_manifest()
        state.start, state.recovery.waits_for = Start.WAITING_FOR_WORKERS, ""
        state.versions.set_layout(())


# Transitions.


def advance(state: RunState) -> effects.Effects:
    """Make the transition that is due, if any."""
    if state.is_running or state.model.manifest is None:
        return
    if not fence.may_release(state):  # another broker may have the run
        return
    if state.start in (Start.ADOPTING, Start.SEEDING, Start.LOADING_FILE):
        yield from _continue_transfer(state)
    elif _run_exists(state):
        yield from _recover(state)
    else:
        yield from _seek_new_run(state)


def _seeds(state: RunState, failures: float = math.inf) -> list[Member]:
    """Workers that have failed less often than this to upload their parameters, in order of joining."""
    return [member for member in state.members if member.seed_failures < failures]


def manifest_is_settled(state: RunState) -> bool:
    """Whether the broker has parameters, so that no worker may define another model."""
    return state.start in (Start.LOADING_FILE, Start.RUNNING) or bool(state.recovery.restored)


def run_is_settled(state: RunState) -> bool:
    """Whether a run exists and no other one may replace it."""
    return state.start in (Start.ADOPTING, Start.RUNNING) or bool(state.recovery.restored)


def _run_exists(state: RunState) -> bool:
    holders = (member for member in _seeds(state) if any(member.versions))
    return bool(state.recovery.restored) or any(holders)


def _continue_transfer(state: RunState) -> effects.Effects:
    seeding = state.seeding
    worker = state.members.named(seeding.worker_id)
    if seeding.is_complete:
        yield from _begin_run(state)
    elif worker is not None and state.run_time - seeding.progress_at > seeding.patience_s:
        yield from _replace(state, worker)


def _recover(state: RunState) -> effects.Effects:
    """Adopt the newest version of each fragment of an existing run, then continue it."""
    model = state.model
    if not model.checkpoint or state.config.recover == "adopt":
        if (yield from _waits(state, *_newer_holders(state))):
            return
        sources = _sources(state, _seeds(state, failures=1))
        if not sources and not _is_restored(state):
            sources = _sources(state, _seeds(state))
        if sources:
            worker, _ = next(iter(sources.values()))
            wanted = {f: version for f, (each, version) in sources.items() if each is worker}
            yield from _adopt_from(state, worker, wanted)
            return
    if _is_restored(state):
        yield from _continue_run(state)
    else:
        yield from _give_up_run(state)


def _is_restored(state: RunState) -> bool:
    """Whether the broker has every fragment of the existing run."""
    return state.recovery.restored.keys() >= set(state.model.all_fragments)


def _sources(state: RunState, members: Sequence[Member]) -> dict[int, tuple[Member, VersionId]]:
    """By fragment, the newest version that is newer than ours, and the first worker that holds it.

    Only versions of the run count; if none is known, of the run of the worker with the most rounds.
    """
    run, fragments = state.model.run or _newest_run(members), state.model.all_fragments
    newest = {f: each.version.counter for f, each in state.recovery.restored.items()}
    found: dict[int, tuple[Member, VersionId]] = {}
    for member in members:
        for fragment, held in enumerate(member.versions):
            if held is None or held.run != run or fragment not in fragments:
                continue
            if held.counter > newest.get(fragment, -1):
                found[fragment], newest[fragment] = (member, held), held.counter
    return found


def _newest_run(members: Sequence[Member]) -> str | None:
    held = [[version for version in member.versions if version] for member in members]
    newest = max(held, key=lambda versions: sum(v.counter + 1 for v in versions), default=[])
    return newest[0].run if newest else None


def _seek_new_run(state: RunState) -> effects.Effects:
    """Start a new run, unless a worker that holds a version of an existing one may rejoin."""
    model = state.model
    if (yield from _waits(state, *_lost_holders(state))):
        return
    if model.initial is not None:
        yield from _load_file(state)
    elif seeds := _seeds(state):
        worker = min(seeds, key=lambda each: each.seed_failures)
        yield effects.info(f"Requesting parameters from {worker.worker_id}.")
        yield from _ask(state, worker, Start.SEEDING, dict.fromkeys(model.all_fragments))


def _waits(state: RunState, whom: str, until: float) -> Generator[effects.Effect, None, bool]:
    """Wait for these workers until that time. Returns False if the wait is over or not needed."""
    recovery = state.recovery
    if not whom or state.run_time >= until:
        state.start, recovery.waits_for = Start.WAITING_FOR_WORKERS, ""
        return False
    if state.start is not Start.WAITING_FOR_HOLDERS or recovery.waits_until != until:
        then = "the run continues" if _run_exists(state) else "a new run starts"
        left = until - state.run_time
        yield effects.info(f"Waiting up to {left:.1f} s for {whom}; then {then}.")
    state.start = Start.WAITING_FOR_HOLDERS
    recovery.waits_for, recovery.waits_until = whom, until
    return True


def _newer_holders(state: RunState) -> tuple[str, float]:
    """Workers that may hold newer versions than the broker, and the deadline for their return."""
    model, recovery, config = state.model, state.recovery, state.config
    if model.checkpoint:
        away = sorted(model.known.keys() - {member.worker_id for member in state.members})
        whom = f"workers of the run that may hold newer rounds: {summarise(away)}"
        return whom if away else "", state.recovers_from + config.recover_wait
    if len(state.members) >= config.workers:
        return "", 0.0
    if recovery.waits_since is None:
        recovery.waits_since = state.run_time
    whom = "workers of the run that may hold newer rounds"
    return whom, recovery.waits_since + config.recover_wait


def _lost_holders(state: RunState) -> tuple[str, float]:
    """Workers that may hold a version of an earlier run, and the deadline for their return."""
    config, lost_at = state.config, state.recovery.holder_lost_at
    if lost_at is not None:
        whom = "the worker that holds the run and whose connection broke"
        return whom, lost_at + config.recover_wait
    if config.has_new_address or state.model.moved_aside:  # no worker knows it, or all are refused
        return "", 0.0
    whom, wait = "workers that may return with an earlier run", config.recover_wait
    if len(state.members) >= config.workers:
        return whom, state.recovers_from + min(wait, RETURN_WITHIN_S)
    return f"{whom}, and for {config.workers} workers to join", state.recovers_from + wait


# Uploads of a seed worker, and the model file.


def _adopt_from(state: RunState, worker: Member, wanted: dict[int, VersionId]) -> effects.Effects:
    model = state.model
    model.run = next(iter(wanted.values())).run
    whose = ", ".join(f"fragment {f} at version {wanted[f]}" for f in sorted(wanted))
    has = "is ahead of the checkpoint" if model.checkpoint else "has parameters of this run"
    instead = ", not the model file's" if model.initial is not None else ""
    yield effects.info(f"{worker.worker_id} {has}; requesting {whose} from it{instead}.")
    yield from _ask(state, worker, Start.ADOPTING, wanted)


def _ask(
    state: RunState, worker: Member, start: Start, wanted: Mapping[int, VersionId | None]
) -> effects.Effects:
    patience_s = SEED_PATIENCE_S * 2**worker.seed_failures
    state.start = start
    state.seeding = Seeding(worker.worker_id, wanted, patience_s, state.run_time)
    yield from _notify(state, worker)


def _notify(state: RunState, worker: Member) -> effects.Effects:
    text = "The broker needs this worker's parameters; upload them."
    for fragment in state.seeding.wanted:
        yield worker.tell(messages.Notice("seed", text, fragment))


def _load_file(state: RunState) -> effects.Effects:
    model = state.model
    state.start, model.run = Start.LOADING_FILE, f"{state.draw():016x}"
    state.seeding = Seeding(wanted=dict.fromkeys(model.all_fragments))
    for fragment in model.all_fragments:
        chunks = state.versions[fragment].layout.chunks
        version = VersionId(model.run, 0, state.draw())
        first = FirstVersion(version, [None] * chunks, Bitmap.full(chunks))
        state.seeding.versions[fragment] = first
        for index in range(chunks):
            yield effects.StoreInitial(fragment, index)


def offered(state: RunState, member: Member, push: messages.Push) -> effects.Effects:
    """Grant the upload of a fragment by the seed worker, or resume an interrupted one."""
    model, seeding = state.model, state.seeding
    if seeding.worker_id != member.worker_id:
        raise ProtocolError(
            Code.NOT_ALLOWED,
            f"The broker did not request parameters from {member.worker_id}: it has some, or requested "
            "them from another worker.",
        )
    if push.fragment not in seeding.wanted:
        text = f"The broker did not request fragment {push.fragment}: it has it."
        raise ProtocolError(Code.NOT_ALLOWED, text)
    if push.base != seeding.wanted[push.fragment]:
        raise ProtocolError(
            Code.BAD_PUSH,
            f"{member.worker_id} joined with fragment {push.fragment} at version "
            f"{seeding.wanted[push.fragment]} but offers {push.base}; its parameters are not used.",
        )
    _check_ledger(push)
    first = seeding.versions.get(push.fragment)
    if first is not None and first.push_id != push.push_id:
        text = f"Fragment {push.fragment} is being uploaded under another push id."
        raise ProtocolError(Code.BAD_PUSH, text)
    if first is None:
        model.run = model.run or f"{state.draw():016x}"
        version = push.base or VersionId(model.run, 0, state.draw())
        wires, ledger = [None] * push.chunks, push.ledger or Ledger()
        first = FirstVersion(version, wires, Bitmap(push.chunks), push.push_id, ledger)
        seeding.versions[push.fragment] = first
    seeding.progress_at = state.run_time
    window = first_window(1)
    windows = tuple(Window(window, window, upload_window(1)) for _ in range(member.processes))
    member.uploads.begin(Upload(push, windows, is_void=first.is_complete))
    held = first.arrived.to_bytes() if first.arrived else None
    standing = messages.Standing.RESUME if held else messages.Standing.NEW
    yield member.tell(messages.Grant(push.push_id, push.fragment, standing, held, window))


def _check_ledger(push: messages.Push) -> None:
    """Raise ProtocolError for an invalid ledger, since it becomes the run's."""
    for pushes in (push.ledger or Ledger()).pushes.values():
        for counted in pushes:
            for chunks in (counted.chunks, counted.from_earlier):
                if chunks is not None:
                    Bitmap.from_bytes(chunks, push.chunks)


def stored(state: RunState, event: events.InitialStored) -> effects.Effects:
    """A chunk is stored: acknowledge it. After the last one the run starts or continues."""
    work, seeding = event.work, state.seeding
    first = seeding.versions[work.fragment]
    assert first.wires[work.index] is None, "a chunk was stored twice"
    first.wires[work.index] = event.wire
    if event.digest:
        first.digests[work.index] = event.digest
    first.stored += 1
    seeding.progress_at = state.run_time
    worker = state.members.named(work.worker_id)
    upload = worker.uploads.of(work.fragment) if worker is not None else None
    if worker is not None and upload is not None:
        is_calm = first.stored == len(first.arrived)
        lane, more = upload.acknowledged(work.index, is_calm=is_calm)
        yield worker.tell(messages.Ack(work.push_id, work.fragment, (work.index,), more, lane))
        if first.is_complete:
            upload.void()
    if seeding.is_complete:
        if state.start is Start.ADOPTING:
            yield from _adopt(state)
        yield from advance(state)


def _adopt(state: RunState) -> effects.Effects:
    """Keep the versions that a worker has uploaded; the outer optimizer's state stays older."""
    model, restored = state.model, state.recovery.restored
    config, size = state.config, state.config.dn_size
    # If a version may have any number of gradients, the state of the buffer is unknown.
    is_unsure = mode_of(config).takes_any_number(config)
    residual = f" The quantization residual of replies in {config.reply_dtype} is lost as well."
    if config.reply_dtype == "fp32":
        residual = ""
    lost: dict[int, int] = {}
    for fragment, first in state.seeding.versions.items():
        ours = restored[fragment].record if fragment in restored else None
        counter, had = first.version.counter, ours.gradients if ours else 0
        lost[fragment] = counter - (ours.version.counter if ours else 0)
        # Without a checkpoint the buffer is empty, however often we adopt; the schedules continue.
        has = had + lost[fragment] if ours and model.checkpoint else counter - counter % size
        if ours and (is_unsure or had // size != (had + lost[fragment]) // size):
            yield effects.ForgetBuffer(fragment)
        restored[fragment] = first.whole(ours, has)
    rounds = [
        f"{number} of fragment {fragment}"
        for fragment, number in sorted(lost.items())
        if fragment < config.num_fragments and number
    ]
    if rounds:
        since = model.checkpoint or "the run started"
        yield effects.warning(
            f"Recovered the parameters from {state.seeding.worker_id}. The outer optimizer's state "
            f"of the rounds since {since} is lost: {', '.join(rounds)}.{residual}"
        )
    state.start, state.seeding = Start.WAITING_FOR_WORKERS, Seeding()


# Uploads that fail.


def refused(state: RunState, event: events.InitialRefused) -> effects.Effects:
    """A chunk of parameters is not finite: request them from another worker."""
    work = event.work
    names = summarise(state.versions[work.fragment].layout.names_in(work.index))
    text = (
        f"The parameters of {work.worker_id or 'the model file'} are not all finite in "
        f"{whole_dtype(state.config.reply_dtype)}, in {names}; a run cannot start from them."
    )
    yield effects.Log("error", text)
    worker = state.members.named(work.worker_id)
    if worker is not None:
        error = messages.Error(Code.NON_FINITE, text, push_id=work.push_id, about="push")
        yield worker.tell(error)
        yield from reject(state, worker)


def reject(state: RunState, member: Member) -> effects.Effects:
    """Stop using a worker as seed worker until it rejoins: its parameters are invalid."""
    if state.seeding.worker_id == member.worker_id:
        member.seed_failures = math.inf
        yield from abandon(state)
        yield from advance(state)


def _replace(state: RunState, worker: Member) -> effects.Effects:
    """Replace a seed worker that makes no progress, or give the only one more time."""
    seeding = state.seeding
    slow = f"{worker.worker_id} has sent no parameters for {seeding.patience_s:g} s"
    worker.seed_failures += 1
    others = _seeds(state, worker.seed_failures)
    if state.start is Start.ADOPTING:
        is_replaceable = _is_restored(state) or bool(_sources(state, others))
    else:
        is_replaceable = bool(others)
    if is_replaceable:
        yield effects.warning(f"{slow}; continuing without it.")
        yield from abandon(state, "Too slow; the broker requests them from another worker.")
        yield from advance(state)
    else:
        seeding.patience_s, seeding.progress_at = 2 * seeding.patience_s, state.run_time
        yield effects.warning(f"{slow}, and no other worker has them; still waiting for it.")


def abandon(state: RunState, why: str = "") -> effects.Effects:
    """Abandon the upload in progress; `why` is sent to a seed worker that is still sending."""
    seeding, state.seeding = state.seeding, Seeding()
    state.start = Start.WAITING_FOR_WORKERS
    worker = state.members.named(seeding.worker_id)
    if worker is not None:
        worker.uploads.void_all()
        for first in seeding.versions.values() if why else ():
            error = messages.Error(Code.NOT_ALLOWED, why, push_id=first.push_id, about="push")
            yield worker.tell(error)
    yield effects.DropInitial(tuple(seeding.versions))
    restored, saved = state.recovery.restored, state.recovery.saved
    for fragment in [f for f in seeding.versions if f in restored]:  # the upload has overwritten it
        del restored[fragment]
        if fragment in saved:
            restored[fragment] = saved[fragment]
        yield effects.Revert(fragment)
    if not restored:
        state.model.run = None


def _give_up_run(state: RunState) -> effects.Effects:
    """Give up a run of which no worker has the rest; a worker without a version starts a new one."""
    model = state.model
    for member in state.members:
        if any(member.versions):
            member.seed_failures = math.inf
    yield effects.warning(
        f"No connected worker has all of run {model.run}. A new run starts with the next worker that "
        "holds no version; restart these workers without their saved state to use them."
    )
    yield effects.DropInitial(tuple(state.recovery.restored))
    state.recovery.restored.clear()
    model.run = None


# The run starts or continues.


def _begin_run(state: RunState) -> effects.Effects:
    source = state.seeding.worker_id or "the model file"
    for fragment, first in state.seeding.versions.items():
        whole = first.whole()
        state.versions.install(fragment, whole)
        yield effects.RecordVersion(whole.version, None, fragment, 0)
    yield effects.info(f"Run {state.model.run} starts with the parameters of {source}.")
    yield from _run(state, 0, is_new=True)


def _continue_run(state: RunState) -> effects.Effects:
    model = state.model
    for member in state.members:
        if any(held is not None and held.run != model.run for held in member.versions):
            # It joined before the broker knew which run continues; its next join is refused.
            state.members.remove(member)
            state.versions.forget(member.bulk)
            text = f"This broker continues run {model.run}, not that of this worker; join again."
            yield member.tell(messages.Rejoin(state.epoch, text))
    for fragment, restored in state.recovery.restored.items():
        state.versions.install(fragment, restored)
    for member in state.members:
        yield from state.versions.warn_of_branches(member.worker_id, member.versions)
    number = sum(s.version.counter for s in state.versions.trained if s.version)
    is_newer = number != model.resumed_number
    source = f"from {model.checkpoint}" if model.checkpoint else "from versions of its workers"
    yield effects.info(f"Run {model.run} continues with round {number}, {source}.")
    yield from _run(state, number, is_new=is_newer)


def _run(state: RunState, number: int, *, is_new: bool) -> effects.Effects:
    """Release the version of every fragment and open a round. `is_new`: it is not saved yet."""
    state.start, state.seeding = Start.RUNNING, Seeding()
    state.recovery.restored.clear()
    state.recovery.saved = {}
    progress.show(state, number)
    yield from room.announce(state)
    yield from state.versions.serve_waiting()
    if is_new and state.config.save_dir is not None:
        yield checkpoints.save(state, number)
    yield from sequence.open_round(state, number)
