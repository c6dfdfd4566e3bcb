"""Pushes as they come in: checked, granted, their chunks given to the reducer one by one.

Every check comes before the first change, so a refused push or chunk leaves the state as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from diloco_broker import providing, sequence
from diloco_broker.events import Effect, Fold, Folded, FoldRefused, Log, Place, Send
from diloco_broker.membership import Member
from diloco_broker.rounds import Ended, Phase
from diloco_broker.state import State
from diloco_broker.transfer import Upload
from diloco_protocol.chunks import FragmentLayout, Segment
from diloco_protocol.codecs import span_bytes, wire_dtype
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.messages import (
    Ack,
    Chunk,
    Commit,
    Error,
    Grant,
    Purpose,
    Push,
    Standing,
)

# A weight is a count of tokens or samples; more than this in one round is a mistake.
MAX_WEIGHT = 1e12


def push(state: State, member: Member, push: Push, now: float) -> Iterator[Effect]:
    """A worker offers a push: tell it what is held already, or that it must wait for its round."""
    _check_push(state, push)
    if push.purpose is Purpose.DONATION:
        yield from providing.begin_donation(state, member, push, now)
        return
    _check_base(state, push)
    round_ = state.round
    assert round_ is not None
    ledger = state.shelf.stocks[push.fragment].ledger
    before = ledger.standing(member.worker_id, push.push_id, push.chunks)
    known = round_.contributions.get((member.worker_id, push.push_id))
    if known is not None and known.ended in (Ended.VOIDED, Ended.ABANDONED):
        raise ProtocolError(
            Code.BAD_PUSH, f"This push was {known.ended.value} in round {round_.number}; drop it."
        )
    if known is None:
        yield from sequence.abandon_others(state, member.worker_id, push.push_id)
    if before.is_full:
        yield Send(member.control, Grant(push.push_id, push.fragment, Standing.COUNTED))
    elif known is not None and (known.ended is None or round_.phase is Phase.OPEN):
        known.ended = None  # the worker is back with the same delta
        yield from sequence.grant(state, member, known)
    elif sequence.takes_now(round_, member, push):
        yield from sequence.enter(state, member, push, before)
    else:
        member.deferred[push.fragment] = push
        text = f"Round {round_.number} does not take it; it will be in a later one."
        yield Send(member.control, Grant(push.push_id, push.fragment, Standing.WAIT, text=text))
    yield from sequence.close_if_due(state)


def chunk(state: State, member: Member, chunk: Chunk, payload: Any) -> Iterator[Effect]:
    """One chunk of a push: hand it to the reducer unless it is there already."""
    upload = member.uploads.get(chunk.fragment)
    if upload is None or upload.push.push_id != chunk.push_id:
        raise ProtocolError(
            Code.BAD_CHUNK,
            f"Chunk {chunk.index} of fragment {chunk.fragment} belongs to no push under way; "
            "send a push and wait for its grant.",
        )
    if upload.is_void:
        return
    push = upload.push
    donation = push.purpose is Purpose.DONATION
    wanted = "fp32" if donation else state.config.wire_dtype
    size = _check_chunk(chunk, payload, state.shelf.stocks[push.fragment].layout, wanted)
    if upload.credit <= 0:
        raise ProtocolError(
            Code.BAD_CHUNK, f"Chunk {chunk.index} came without credit; wait for an ack."
        )
    if donation:
        arrived = providing.arrived(state, push)
    else:
        assert state.round is not None
        contribution = state.round.contributions[member.worker_id, push.push_id]
        if contribution.ended is not None:
            return  # it was under way when its worker came with another push
        arrived = contribution.arrived
        if chunk.index in contribution.before:
            arrived = contribution.before
    member.account.bytes_up += size
    state.totals.bytes_up += size
    upload.credit -= 1
    if chunk.index in arrived:
        yield from acknowledge(member, upload, chunk.index)
        return
    arrived.add(chunk.index)
    key = (member.worker_id, push.push_id)
    if donation:
        yield Place(push.fragment, chunk.index, payload, *key)
    else:
        yield Fold(push.fragment, chunk.index, *key, push.weight, payload)


def acknowledge(member: Member, upload: Upload, index: int) -> Iterator[Effect]:
    """A chunk is in: its credit goes back to the sender."""
    upload.credit += 1
    yield Send(member.control, Ack(upload.push.push_id, upload.push.fragment, (index,)))


def commit(state: State, member: Member, commit: Commit) -> None:
    """Every chunk was sent. The streaming reducer counts chunks and needs no more than the note."""
    if state.round is not None:
        contribution = state.round.contributions.get((member.worker_id, commit.push_id))
        if contribution is not None:
            contribution.committed = True


def folded(state: State, event: Folded) -> Iterator[Effect]:
    """A chunk is in the accumulator."""
    work = event.work
    assert state.round is not None and state.round.fragment == work.fragment
    ready = state.round.folded((work.worker_id, work.push_id), work.index)
    member = state.members.named(work.worker_id)
    upload = member.uploads.get(work.fragment) if member else None
    if member and upload and upload.push.push_id == work.push_id:
        yield from acknowledge(member, upload, work.index)
    yield from sequence.step(state, ready)
    yield from sequence.close_if_due(state)


def fold_refused(state: State, event: FoldRefused) -> Iterator[Effect]:
    """A chunk was not finite: the push is void from there on, the round goes on."""
    work = event.work
    assert state.round is not None and state.round.fragment == work.fragment
    key = (work.worker_id, work.push_id)
    is_news = state.round.contributions[key].ended is not Ended.VOIDED
    ready = state.round.refused(key, work.index)
    if is_news:
        state.totals.rejected += 1
        text = (
            f"Chunk {work.index} of the pseudo-gradient of {work.worker_id} has values that are "
            "not finite; the push is void from there on, the round goes on without it."
        )
        yield Log("warning", text)
        member = state.members.named(work.worker_id)
        upload = member.uploads.get(work.fragment) if member else None
        if member and upload and upload.push.push_id == work.push_id:
            member.rejected += 1
            upload.is_void = True
            error = Error(Code.NON_FINITE, text, push_id=work.push_id, about="push")
            yield Send(member.control, error)
    yield from sequence.step(state, ready)
    yield from sequence.close_if_due(state)


def _check_push(state: State, push: Push) -> None:
    stocks = state.shelf.stocks
    if not 0 <= push.fragment < len(stocks):
        raise ProtocolError(Code.BAD_PUSH, f"There is no fragment {push.fragment} in this run.")
    chunks = stocks[push.fragment].layout.chunks
    if push.chunks != chunks or not chunks:
        raise ProtocolError(
            Code.BAD_PUSH,
            f"The push has {push.chunks} chunks, fragment {push.fragment} has {chunks}.",
        )
    wanted = "fp32" if push.purpose is Purpose.DONATION else state.config.wire_dtype
    if push.wire_dtype != wanted:
        raise ProtocolError(
            Code.BAD_PUSH, f"The push is in {push.wire_dtype:.20}, it must be in {wanted}."
        )
    if not (math.isfinite(push.weight) and 0 < push.weight <= MAX_WEIGHT):
        raise ProtocolError(
            Code.BAD_PUSH,
            f"The weight is {push.weight}; it must be above 0 and at most {MAX_WEIGHT:g}.",
        )


def _check_base(state: State, push: Push) -> None:
    stocks = state.shelf.stocks
    if push.fragment == len(stocks) - 1:
        raise ProtocolError(Code.BAD_PUSH, "Frozen parameters are not trained.")
    current = stocks[push.fragment].version
    if current is None or state.round is None:
        raise ProtocolError(
            Code.NO_MODEL, "Nobody has provided parameters yet; pull before you push."
        )
    base = push.base
    # A base newer than ours is that of a worker that outlived a broker; its delta is as good as any.
    if base is None or base.run != current.run:
        raise ProtocolError(
            Code.BAD_PUSH,
            f"The push starts from version {base}, this broker is at {current} of run "
            f"{current.run}; pull the current parameters first.",
        )


def _check_chunk(chunk: Chunk, payload: Any, layout: FragmentLayout, wire: str) -> int:
    """Bytes of the chunk, which are as many as they must be."""
    if not 0 <= chunk.index < layout.chunks:
        raise ProtocolError(
            Code.BAD_CHUNK,
            f"There is no chunk {chunk.index}; fragment {layout.fragment} has {layout.chunks}.",
        )
    span = layout.spans[chunk.index]
    wanted = span_bytes(span, wire_dtype(wire))
    size = int(payload.nbytes)
    if size != wanted:
        names = {Segment.PARAMETERS: wire, Segment.BUFFERS: "fp32", Segment.INTEGERS: "int64"}
        raise ProtocolError(
            Code.BAD_CHUNK,
            f"Chunk {chunk.index} has {size} bytes, it must have {wanted}: "
            f"{span.elements} elements in {names[span.segment]}.",
        )
    return size
