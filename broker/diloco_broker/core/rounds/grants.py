"""Answers to a push: granted, deferred, counted, refused; and acknowledgements of its chunks."""

from __future__ import annotations

from collections.abc import Sequence

from diloco_broker.core import effects
from diloco_broker.core.members.members import Member
from diloco_broker.core.rounds.round import PushInProgress, PushKey
from diloco_broker.core.rounds.uploads import Upload
from diloco_broker.core.state import RunState
from diloco_protocol import messages
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.errors import Code


def grant(
    member: Member, found: PushInProgress, *, sharing: int, number: int | None
) -> effects.Effects:
    """Grant a push: its worker sends the missing chunks, within its credit.

    `sharing` pushes may be in progress at a time; `number` is that of the round, if there are rounds.
    """
    push, held = found.push, found.held
    # Chunks that have arrived and are not acknowledged are still in memory.
    waiting = len(found.arrived) - len(found.taken)
    # Chunks that a relay holds take no memory here, and their credit returns over a slow link.
    stays = member.relay is not None and member.relay.combines
    credit = member.uploads.grant(
        push, waiting=waiting, sharing=sharing, lanes=member.processes, is_bounded=not stays
    )
    standing = messages.Standing.RESUME if held else messages.Standing.NEW
    have = held.to_bytes() if held else None
    yield member.tell(
        messages.Grant(push.push_id, push.fragment, standing, have, credit, round=number)
    )


def counted(member: Member, push: messages.Push) -> effects.Effects:
    yield member.tell(messages.Grant(push.push_id, push.fragment, messages.Standing.COUNTED))


def wait(member: Member, push: messages.Push, text: str, number: int | None) -> effects.Effects:
    """Defer a push; another grant follows."""
    member.defer(push)
    yield member.tell(
        messages.Grant(push.push_id, push.fragment, messages.Standing.WAIT, text=text, round=number)
    )


def acknowledge(state: RunState, member: Member, upload: Upload, index: int) -> effects.Send:
    """Acknowledge a chunk, which returns its credit to the sender."""
    lane, more = member.uploads.acknowledged(upload, index, is_calm=not state.chunks_waiting)
    push = upload.push
    return member.tell(messages.Ack(push.push_id, push.fragment, (index,), more, lane))


def acknowledge_work(
    state: RunState, work: effects.Fold | effects.Inspect
) -> Sequence[effects.Send]:
    """Acknowledge the chunk of completed tensor work, if its push is still in progress."""
    member = state.members.named(work.worker_id)
    upload = member.uploads.under_way(work.fragment, work.push_id) if member else None
    if member is None or upload is None or upload.is_void:
        return ()
    return (acknowledge(state, member, upload, work.index),)


def refuse(
    state: RunState,
    fragment: int,
    key: PushKey,
    code: Code,
    text: str,
    *,
    taken: Bitmap | None = None,
) -> effects.Effects:
    """Refuse the rest of a push: notify operators, and its worker if that is still sending it.

    `taken` are chunks that the current round counts nevertheless; None: none.
    """
    worker_id, push_id = key
    state.reject(worker_id, code.value, text)
    yield from state.warn(f"push of {worker_id} {code.value}", text)
    member = state.members.named(worker_id)
    if member and member.uploads.void(fragment, push_id):
        member.figures.rejected += 1
        versions = state.versions[fragment]
        counted = versions.ledger.own_chunks(worker_id, push_id, versions.layout.chunks)
        if taken is not None:
            counted |= taken
        error = messages.Error(
            code, text, push_id=push_id, about="push", counted=counted.to_bytes()
        )
        yield member.tell(error)


def refuse_values(
    state: RunState, work: effects.Fold | effects.Inspect, then: str, *, taken: Bitmap | None = None
) -> effects.Effects:
    """Refuse a push because of the values of a chunk; `then` says what becomes of the push."""
    text = (
        f"Chunk {work.index} of the pseudo-gradient of {work.worker_id} is not finite or cannot be "
        f"read; {then}."
    )
    key = (work.worker_id, work.push_id)
    yield from refuse(state, work.fragment, key, Code.NON_FINITE, text, taken=taken)
