"""A worker donates its parameters: their chunks are taken in, and a fragment is said to be whole.

Who is asked, and what becomes of a whole donation, is `initial_model`'s affair.
"""

from __future__ import annotations

from diloco_broker.core import effects, events
from diloco_broker.core.members.members import Member
from diloco_broker.core.members.model_source import Intake
from diloco_broker.core.rounds.uploads import Upload, Window, first_window, upload_window
from diloco_broker.core.state import RunState
from diloco_protocol import messages
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.version import RUN_PATTERN, Ledger, VersionId

# More outer steps than any run takes; keeps counters within 64 bits.
MAX_COUNTER = 1 << 48


def begin(state: RunState, member: Member, push: messages.Push) -> effects.Effects:
    """The donor offers a fragment; a donation that broke off goes on where it stopped."""
    model = state.model
    if model.donation.donor != member.worker_id:
        raise ProtocolError(
            Code.NOT_ALLOWED,
            f"Parameters of {member.worker_id} are not wanted: the run has others, or another worker "
            "was asked.",
        )
    _check_provenance(push)
    if push.fragment not in model.donation.wanted:
        text = f"Fragment {push.fragment} is not wanted: the broker has it."
        raise ProtocolError(Code.NOT_ALLOWED, text)
    run = push.base.run if push.base else model.run
    if model.run is not None and model.run != run:
        raise ProtocolError(Code.BAD_PUSH, "The fragments donated are of different runs.")
    _check_promise(member, push)
    intake = model.donation.intakes.get(push.fragment)
    if intake is not None and intake.push is not None and intake.push.push_id != push.push_id:
        raise ProtocolError(Code.BAD_PUSH, f"Fragment {push.fragment} is donated already.")
    if intake is None:
        model.run = run or f"{state.draw():016x}"
        version = push.base or VersionId(model.run, 0, state.draw())
        intake = Intake(version, [None] * push.chunks, Bitmap(push.chunks), push)
        model.donation.intakes[push.fragment] = intake
    model.donation.progress_at = state.run_time
    window = first_window(1)
    windows = tuple(Window(window, window, upload_window(1)) for _ in range(member.processes))
    member.uploads.begin(Upload(push, windows, is_void=intake.is_whole))
    held = intake.arrived.to_bytes() if intake.arrived else None
    standing = messages.Standing.RESUME if held else messages.Standing.NEW
    yield member.tell(messages.Grant(push.push_id, push.fragment, standing, held, window))


def is_sound(version: VersionId) -> bool:
    """Can this be the name of a version of a run?"""
    return (
        RUN_PATTERN.fullmatch(version.run) is not None
        and 0 <= version.counter <= MAX_COUNTER
        and 0 <= version.tag < 1 << 64
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
    if push.base is not None and not is_sound(push.base):
        raise ProtocolError(Code.BAD_PUSH, "The donated version has no valid name.")
    for pushes in (push.ledger or Ledger()).pushes.values():
        for counted in pushes:
            for chunks in (counted.chunks, counted.from_earlier):
                if chunks is not None:
                    Bitmap.from_bytes(chunks, push.chunks)


def arrived(state: RunState, push: messages.Push) -> Bitmap | None:
    """The chunks received of a donation; None when it is over."""
    intake = state.model.donation.intakes.get(push.fragment)
    return None if intake is None else intake.arrived


def stored(state: RunState, event: events.InitialStored) -> effects.Effects:
    """A chunk is in place: its credit goes back to the donor."""
    work, model = event.work, state.model
    intake = model.donation.intakes[work.fragment]
    assert intake.wires[work.index] is None, "a chunk was stored twice"
    intake.wires[work.index] = event.wire
    if event.digest:
        intake.digests[work.index] = event.digest
    intake.stored += 1
    model.donation.progress_at = state.run_time
    donor = state.members.named(work.worker_id)
    upload = donor.uploads.of(work.fragment) if donor is not None else None
    if donor is not None and upload is not None:
        is_calm = intake.stored == len(intake.arrived)
        lane, more = upload.acknowledged(work.index, is_calm=is_calm)
        yield donor.tell(messages.Ack(work.push_id, work.fragment, (work.index,), more, lane))
        if intake.is_whole:
            upload.void()


def abandon(state: RunState, why: str = "") -> effects.Effects:
    """The donor cannot go on, or need not (`why`): forget what came from it."""
    donor = state.members.named(state.model.donation.donor or "")
    if donor is not None:
        donor.uploads.void_all()
        for intake in state.model.donation.intakes.values():
            if why and intake.push is not None:
                push_id = intake.push.push_id
                yield donor.tell(
                    messages.Error(Code.NOT_ALLOWED, why, push_id=push_id, about="push")
                )
    begun = tuple(state.model.donation.intakes)
    over = [fragment for fragment in begun if fragment in state.model.restored]
    state.model.abandon()
    yield effects.DropInitial(begun)
    for fragment in over:
        state.model.revert(fragment)
        yield effects.Revert(fragment)
