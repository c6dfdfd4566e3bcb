"""Answers to a push: send these chunks, wait, there is nothing left to send, it is over."""

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
    """Send the chunks that are not held, a window of them at a time.

    `sharing` pushes may be under way at the same time; `number` is the round's, if there are rounds.
    """
    push, held = found.push, found.held
    # Chunks that have come and are not acknowledged are still in our memory.
    waiting = len(found.arrived) - len(found.taken)
    # What stays at a relay is in no memory of ours, and its credit comes back over a long line.
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
    """Another grant follows; the push is kept until then."""
    member.defer(push)
    yield member.tell(
        messages.Grant(push.push_id, push.fragment, messages.Standing.WAIT, text=text, round=number)
    )


def acknowledge(state: RunState, member: Member, upload: Upload, index: int) -> effects.Send:
    """A chunk is in: its credit goes back to the sender."""
    lane, more = member.uploads.acknowledged(upload, index, is_calm=not state.chunks_waiting)
    push = upload.push
    return member.tell(messages.Ack(push.push_id, push.fragment, (index,), more, lane))


def acknowledge_work(
    state: RunState, work: effects.Fold | effects.Inspect
) -> Sequence[effects.Send]:
    """The same for tensor work that is done, if its push is still the one under way."""
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
    """Refuse the rest of a push: tell its worker, if it is still sending it, and the operators.

    `taken` are chunks that the open round counts all the same; None: nothing.
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
