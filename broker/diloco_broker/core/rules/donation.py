"""Getting the first parameters: placing the model file, asking workers, taking in a donation."""

from __future__ import annotations

import math
from collections.abc import Generator

from diloco_broker.core import effects, events
from diloco_broker.core.rules import initial_model, rounds
from diloco_broker.core.state.members import Member
from diloco_broker.core.state.model_source import Intake
from diloco_broker.core.state.run import RunState
from diloco_broker.core.state.run_record import run_record
from diloco_broker.core.state.versions import Upload, first_window, upload_window
from diloco_protocol import messages
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.dtypes import span_bytes
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.manifest import summarise
from diloco_protocol.version import RUN_PATTERN, Ledger, VersionId

# More outer steps than any run takes; keeps counters within 64 bits.
MAX_COUNTER = 1 << 48
# A broker that comes back without a checkpoint may be the second life of one, and its workers on their
# way: they try again every 2 s (protocol/README.md, section 7), and then join. So long after its start
# parameters that would begin a new run are not taken.
RETURN_WITHIN_S = 3.0


def seek(state: RunState) -> effects.Effects:
    """Get parameters if there are none: of a run that exists, else the model file's, else a worker's."""
    boot = state.bootstrap
    if boot.is_done or boot.is_loading or boot.manifest is None:
        return
    donor = state.members.named(boot.donor or "")
    if donor is not None:
        yield from ask(state, donor)
    elif initial_model.is_called_for(state):
        yield from initial_model.seek(state)
    elif not (yield from _wait_for_a_run(state)):
        if boot.initial is not None:
            yield from _load_file(state)
        else:
            yield from _ask_a_newcomer(state)


def _wait_for_a_run(state: RunState) -> Generator[effects.Effect, None, bool]:
    """True while a worker that holds a version may be on its way: no new run takes its place."""
    boot, config = state.bootstrap, state.config
    here = len(state.members)
    until, whom = state.now, ""
    if boot.holder_lost_at is not None:
        until = boot.holder_lost_at + config.recover_wait
        whom = "the worker that holds the run and whose connection broke"
    elif not config.has_new_address:
        enough = here >= config.workers  # more may have been in an earlier run
        until = state.started_at + min(config.recover_wait, RETURN_WITHIN_S if enough else math.inf)
        whom = "workers that may come back with an earlier run"
        whom += "" if enough else f", and for {config.workers} workers to be here"
    if state.now >= until:
        whom = ""
    elif whom != boot.waits_for:
        text = f"Waiting {until - state.now:.1f} s at most for {whom}; then a new run begins."
        yield effects.Log("info", text)
    boot.waits_for = whom
    return bool(whom)


def _ask_a_newcomer(state: RunState) -> effects.Effects:
    boot = state.bootstrap
    donor = boot.choose_donor(state.members)
    if donor is None and boot.ask_all_again():
        donor = boot.choose_donor(state.members)
    if donor is not None:
        boot.ask(donor, boot.all_fragments, state.now)
        yield effects.Log("info", f"Asking {donor.worker_id} for its parameters.")
        yield from ask(state, donor)


def ask(state: RunState, donor: Member) -> effects.Effects:
    """Ask the donor for what is needed; again on a new connection, another one if it is silent."""
    boot = state.bootstrap
    if state.now - boot.progress_at > boot.patience_s:
        yield from _pass_over(state, donor)
    elif boot.asked != donor.session:
        boot.asked = donor.session
        for fragment in boot.wanted:
            text = "The broker needs the parameters of this worker; send them."
            yield effects.Send(donor.control, messages.Notice("donate", text, fragment))


def _pass_over(state: RunState, donor: Member) -> effects.Effects:
    """A donor delivers nothing: another one is asked. Where there is none, it gets more time."""
    boot = state.bootstrap
    slow = f"{donor.worker_id} has sent no parameters for {boot.patience_s:g} s"
    boot.passed_over.add(donor.worker_id)
    if initial_model.can_do_without(state, donor):
        yield effects.Log("warning", f"{slow}; going on without it.")
        yield from abandon_donation(state, why="The broker asks another worker meanwhile.")
    else:
        boot.ask_all_again()
        boot.progress_at = state.now
        yield effects.Log("warning", f"{slow}, and nobody else has them; waiting for it.")


def _load_file(state: RunState) -> effects.Effects:
    boot = state.bootstrap
    boot.is_loading = True
    boot.run = f"{state.draw():016x}"
    boot.wanted = boot.all_fragments
    for each in state.versions.fragments:
        chunks = each.layout.chunks
        if chunks:
            version = VersionId(boot.run, 0, state.draw())
            intake = Intake(version, [None] * chunks, Bitmap.full(chunks))
            boot.intakes[each.layout.fragment] = intake
            for index in range(chunks):
                yield effects.StoreInitial(each.layout.fragment, index)


def begin_donation(state: RunState, member: Member, push: messages.Push) -> effects.Effects:
    """The donor offers a fragment; a donation that broke off goes on where it stopped."""
    boot = state.bootstrap
    if boot.donor != member.worker_id:
        raise ProtocolError(
            Code.NOT_ALLOWED,
            f"Parameters of {member.worker_id} are not wanted: the run has others, or another worker "
            "was asked.",
        )
    _check_provenance(push)
    if push.fragment not in boot.wanted:
        raise ProtocolError(
            Code.NOT_ALLOWED, f"Fragment {push.fragment} is not wanted: the broker has it."
        )
    run = push.base.run if push.base else boot.run
    if boot.run is not None and boot.run != run:
        raise ProtocolError(Code.BAD_PUSH, "The fragments donated are of different runs.")
    _check_promise(member, push)
    intake = boot.intakes.get(push.fragment)
    if intake is not None and intake.push is not None and intake.push.push_id != push.push_id:
        raise ProtocolError(Code.BAD_PUSH, f"Fragment {push.fragment} is donated already.")
    if intake is None:
        boot.run = run or f"{state.draw():016x}"
        version = push.base or VersionId(boot.run, 0, state.draw())
        intake = Intake(version, [None] * push.chunks, Bitmap(push.chunks), push)
        boot.intakes[push.fragment] = intake
    boot.progress_at = state.now
    window = first_window(1)
    member.uploads[push.fragment] = Upload(
        push, window, window, upload_window(1), is_void=intake.is_whole
    )
    held = intake.arrived.to_bytes() if intake.arrived else None
    standing = messages.Standing.RESUME if held else messages.Standing.NEW
    yield effects.Send(
        member.control, messages.Grant(push.push_id, push.fragment, standing, held, window)
    )


def _check_promise(member: Member, push: messages.Push) -> None:
    """A worker was asked for what it said it holds: no other version takes the place of ours."""
    said = dict(enumerate(member.versions)).get(push.fragment)
    if push.base != said:
        raise ProtocolError(
            Code.BAD_PUSH,
            f"{member.worker_id} said that it holds fragment {push.fragment} at version {said} and "
            f"offers {push.base}; it is not asked again.",
        )


def _check_provenance(push: messages.Push) -> None:
    """Version and ledger of a donation become the run's own: they must be sound."""
    base = push.base
    if base is not None and not (
        RUN_PATTERN.fullmatch(base.run)
        and 0 <= base.counter <= MAX_COUNTER
        and 0 <= base.tag < 1 << 64
    ):
        raise ProtocolError(Code.BAD_PUSH, "The donated version has no sound name.")
    for pushes in (push.ledger or Ledger()).pushes.values():
        for counted in pushes:
            if counted.chunks is not None:
                Bitmap.from_bytes(counted.chunks, push.chunks)


def arrived(state: RunState, push: messages.Push) -> Bitmap | None:
    """The chunks received of a donation; None when it is over."""
    intake = state.bootstrap.intakes.get(push.fragment)
    return None if intake is None else intake.arrived


def placed(state: RunState, event: events.InitialStored) -> effects.Effects:
    """A chunk of the first version is in place; with the last of all the first round opens."""
    work, boot = event.work, state.bootstrap
    intake = boot.intakes[work.fragment]
    assert intake.wires[work.index] is None, "a chunk was placed twice"
    intake.wires[work.index] = event.wire
    intake.placed += 1
    boot.progress_at = state.now
    donor = state.members.named(work.worker_id)
    if donor is not None and work.fragment in donor.uploads:
        upload = donor.uploads[work.fragment]
        more = upload.acknowledged(is_calm=intake.placed == len(intake.arrived))
        yield effects.Send(
            donor.control, messages.Ack(work.push_id, work.fragment, (work.index,), more)
        )
        upload.is_void = intake.is_whole
    if boot.is_complete:
        if intake.push is not None and intake.push.base is not None:
            yield from initial_model.adopted(state, work.worker_id)
        else:
            yield from _begin_run(state, work.worker_id or "the model file")


def _begin_run(state: RunState, source: str) -> effects.Effects:
    boot = state.bootstrap
    for fragment, intake in boot.intakes.items():
        state.versions.install(fragment, intake.version, intake.wires, Ledger())
        yield effects.RecordVersion(intake.version, None, fragment, 0)
    yield effects.Log("info", f"Run {boot.run} begins with the parameters of {source}.")
    yield from begin(state, 0, is_new=True)


def begin(state: RunState, number: int, *, is_new: bool) -> effects.Effects:
    """Every fragment has a version: readers get it, and a round opens.

    Args:
        is_new: no checkpoint has all of it yet.
    """
    state.bootstrap.finish()
    if state.config.is_staged:
        yield effects.Log("info", _room_needed(state))
    yield from state.versions.serve_waiting()
    if is_new and state.config.save_dir is not None:
        yield effects.Save(number, run_record(state, number))
    yield from rounds.open_round(state, number)
    round_, here = state.round, len(state.members)
    if round_ is not None and here < round_.floor:
        are = "is" if here == 1 else "are"
        yield effects.Log(
            "info", f"Round {number} waits for {round_.floor} workers; {here} {are} here."
        )


def _room_needed(state: RunState) -> str:
    """What keeping whole submissions costs, said at the start."""
    config, layouts = state.config, [each.layout for each in state.versions.trained]
    sizes = [sum(span_bytes(span, config.wire_dtype) for span in part.spans) for part in layouts]
    if config.is_async and not config.grace:
        many, whose, size = config.staging_slots, "slot", max(sizes)
    else:  # each worker may have one of each fragment waiting
        many, whose, size = config.workers, "worker", sum(sizes)
    return (
        f"{config.why_staged} needs whole submissions: up to {many} {whose}{'s'[: many != 1]} x "
        f"{_megabytes(size)} of memory beyond parameters and momentum."
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def place_refused(state: RunState, event: events.InitialRefused) -> effects.Effects:
    """A donation has values that cannot be used: ask another worker."""
    work = event.work
    names = summarise(state.versions[work.fragment].layout.names_in(work.index))
    text = (
        f"The parameters of {work.worker_id or 'the model file'} are not all finite in "
        f"{state.config.reply_dtype}, in {names}; they cannot begin a run."
    )
    yield effects.Log("error", text)
    donor = state.members.named(work.worker_id)
    if donor is not None:
        error = messages.Error(Code.NON_FINITE, text, push_id=work.push_id, about="push")
        yield effects.Send(donor.control, error)
        yield from reject_donor(state, donor)


def reject_donor(state: RunState, donor: Member) -> effects.Effects:
    """What this worker donates cannot be used: it is not asked again."""
    if state.bootstrap.donor == donor.worker_id:
        state.bootstrap.rejected_donors.add(donor.worker_id)
        yield from abandon_donation(state)


def abandon_donation(state: RunState, why: str = "") -> effects.Effects:
    """The donor cannot go on, or need not (`why`): forget what came from it and ask the next."""
    donor = state.members.named(state.bootstrap.donor or "")
    if donor is not None:
        for upload in donor.uploads.values():
            upload.is_void = True
        for intake in state.bootstrap.intakes.values():
            if why and intake.push is not None:
                push_id = intake.push.push_id
                yield effects.Send(
                    donor.control,
                    messages.Error(Code.NOT_ALLOWED, why, push_id=push_id, about="push"),
                )
    over = [f for f in state.bootstrap.intakes if f in state.bootstrap.restored]
    state.bootstrap.abandon()
    yield effects.DropInitial()
    for fragment in over:
        state.bootstrap.revert(fragment)
        yield effects.Revert(fragment)
    yield from seek(state)
