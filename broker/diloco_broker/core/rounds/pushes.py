"""Incoming pushes and their chunks: checked, then handed to the mode of the run.

All checks precede the first change, so a refused push or chunk leaves the state unchanged.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from diloco_broker.core import effects, events
from diloco_broker.core.data import units
from diloco_broker.core.members import liveness, seeding
from diloco_broker.core.members.members import Member
from diloco_broker.core.relays import combining
from diloco_broker.core.rounds import grants
from diloco_broker.core.rounds.modes import rules_of
from diloco_broker.core.rounds.round import PushInProgress
from diloco_broker.core.state import RunState
from diloco_protocol import messages
from diloco_protocol.chunks import FragmentLayout, Segment
from diloco_protocol.dtypes import WIRE_DTYPES, least_bytes, span_bytes, travels_in
from diloco_protocol.errors import Code, ProtocolError

# A weight is a number of tokens or samples. A larger one is a mistake; with a smaller one fp32 would
# underflow.
MIN_WEIGHT, MAX_WEIGHT = 1e-12, 1e12
MAX_SQUARE = 1e18  # of tokens^2 / steps; relays rely on the limit (`LARGEST`)


def push(state: RunState, member: Member, push: messages.Push) -> effects.Effects:
    """A worker offers a push: grant it, or defer it."""
    _check_push(state, push)
    if push.purpose is messages.Purpose.SEEDING:
        yield from seeding.offered(state, member, push)
        return
    if state.ending.is_over:
        raise ProtocolError(Code.LATE, f"The run is over: {state.ending.why}.")
    _check_base(state, push)
    has_units = units.check(state, member, push)
    rules_of(state).check(state, member, push)
    if push.ledger is not None:  # only a seed worker needs it
        push = replace(push, ledger=None)
    if member.uploads.is_new(push):
        yield from liveness.mark_active(state, member)
    if member.uploads.has_zeros_again(push):
        whose = f"for fragment {push.fragment} " if state.config.num_fragments > 1 else ""
        yield effects.warning(
            f"{member.worker_id} has sent a pseudo-gradient of all zeros {whose}twice in a row, the "
            f"last time after {push.steps} steps: it learns nothing there. Look for a learning rate of "
            "0 (a scheduler), frozen parameters, or an optimizer over other parameters."
        )
    yield from rules_of(state).offer(state, member, push)
    if has_units and member.has_unfinished(push):
        units.under_way(state, member, push)


def chunk(
    state: RunState, member: Member, route: effects.Route, chunk: messages.Chunk, payload: Any
) -> effects.Effects:
    """A chunk of a push: hand it to the mode unless it has arrived before."""
    if not member.takes_chunks_on(route):
        return  # another of its data connections broke: it will rejoin and offer the push again
    upload = member.uploads.of(chunk.fragment)
    if upload is None or upload.push.push_id != chunk.push_id:
        raise ProtocolError(
            Code.BAD_CHUNK,
            f"Chunk {chunk.index} of fragment {chunk.fragment} belongs to no granted push; send a push "
            "and wait for its grant.",
        )
    if upload.is_void:
        return
    push = upload.push
    is_seeding = push.purpose is messages.Purpose.SEEDING
    layout = state.versions[push.fragment].layout
    size = check_size(chunk.index, payload, layout, push.wire_dtype)
    is_held, lane = isinstance(payload, messages.Held), member.lane_of(route)
    if is_held:
        combining.check(state, member, route, push, payload)
    if not upload.may_come(lane):
        text = f"No credit for chunk {chunk.index}; wait for an ack."
        raise ProtocolError(Code.BAD_CHUNK, text)
    first = state.seeding.versions.get(push.fragment) if is_seeding else None
    found = None if is_seeding else rules_of(state).find(state, member.worker_id, push)
    if first is not None:
        arrived = first.arrived
    elif found is not None:
        arrived = found.before if chunk.index in found.before else found.arrived
    else:
        return  # it was in flight when its push ended
    member.account.bytes_up += size
    state.totals.bytes_up += 0 if is_held else size
    upload.comes(chunk.index, lane)
    if chunk.index in arrived:
        yield grants.acknowledge(state, member, upload, chunk.index)
        return
    arrived.add(chunk.index)
    if found is None:
        key = (member.worker_id, push.push_id)
        yield effects.StoreInitial(push.fragment, chunk.index, payload, *key)
    elif is_held:
        yield from _remote_chunk(state, member, found, chunk.index, payload)
    else:
        state.chunks_waiting += 1
        yield found.work(chunk.index, payload)


def _remote_chunk(
    state: RunState, member: Member, push: PushInProgress, index: int, held: messages.Held
) -> effects.Effects:
    """A relay holds a chunk and has inspected it."""
    upload = member.uploads.of(push.push.fragment)
    if upload is None or not combining.is_usable(held):
        yield from rules_of(state).refused(state, events.WorkRefused(push.work(index, held)))
        return
    combining.hold(state, member, push, index, held)
    yield grants.acknowledge(state, member, upload, index)


def commit(state: RunState, member: Member, commit: messages.Commit) -> effects.Effects:
    if state.round is not None:
        rules_of(state).commit(state, member, commit)
    yield from ()


def done(state: RunState, event: events.WorkDone) -> effects.Effects:
    state.chunks_waiting -= 1
    if not event.work.worker_id:
        return combining.added(state, event)
    return rules_of(state).done(state, event)


def refused(state: RunState, event: events.WorkRefused) -> effects.Effects:
    state.chunks_waiting -= 1
    return rules_of(state).refused(state, event)


def _check_push(state: RunState, push: messages.Push) -> None:
    fragments = state.versions.fragments
    if not 0 <= push.fragment < len(fragments):
        raise ProtocolError(Code.BAD_PUSH, f"This run has no fragment {push.fragment}.")
    layout = fragments[push.fragment].layout
    chunks = layout.chunks
    if push.chunks != chunks or not chunks:
        text = f"The push has {push.chunks} chunks, fragment {push.fragment} has {chunks}."
        raise ProtocolError(Code.BAD_PUSH, text)
    is_gradient = push.purpose is messages.Purpose.GRADIENT
    if is_gradient and layout.lengths[Segment.BUFFERS] and push.buffers != messages.BUFFERS:
        raise ProtocolError(
            Code.BAD_PUSH,
            f"This push has float buffers as {push.buffers:.20}, this broker expects them as "
            f"{messages.BUFFERS}; install the same release at both ends.",
        )
    # Each push has its own dtype: a worker may override the run's, and a delta that was frozen before a
    # restart keeps its dtype.
    allowed = ("fp32",) if push.purpose is messages.Purpose.SEEDING else WIRE_DTYPES
    if push.wire_dtype not in allowed:
        text = f"The push is in {push.wire_dtype:.20}, it must be in {' or '.join(allowed)}."
        raise ProtocolError(Code.BAD_PUSH, text)
    _check_weight(state, push)


def _check_weight(state: RunState, push: messages.Push) -> None:
    by = state.config.weight_by
    if push.purpose is messages.Purpose.SEEDING:
        return
    needed = messages.WEIGHTS[by]
    for name in needed:
        if getattr(push, name) < 1:
            raise ProtocolError(
                Code.BAD_PUSH,
                f"Contributions weigh by their {by} in this run, and this push reports "
                f"{getattr(push, name)} {name}; call report({needed[0]}=...) with each step.",
            )
    weight, most = state.weight_of(push), MAX_WEIGHT if len(needed) < 2 else MAX_SQUARE
    if not (math.isfinite(weight) and MIN_WEIGHT <= weight <= most):
        text = f"The weight is {weight}; it must be from {MIN_WEIGHT:g} to {most:g}."
        raise ProtocolError(Code.BAD_PUSH, text)
    if weight != 1 and state.config.max_delta_norm is not None:
        # A heavy push would need no length to outweigh all others.
        text = f"The weight is {weight:g}; it must be 1 in a run with --max-delta-norm."
        raise ProtocolError(Code.BAD_PUSH, text)


def _check_base(state: RunState, push: messages.Push) -> None:
    fragments = state.versions.fragments
    if push.fragment == len(fragments) - 1:
        raise ProtocolError(Code.BAD_PUSH, "Frozen parameters are not trained.")
    current = fragments[push.fragment].version
    if current is None or state.round is None:
        whom = state.recovery.waits_for or "the parameters of a worker"
        text = f"The broker waits for {whom}; this push can be offered again when a round is open."
        raise ProtocolError(Code.NO_MODEL, text)
    base = push.base
    # A base newer than ours is that of a worker that outlived a broker; its delta is as good as any.
    if base is None or base.run != current.run:
        raise ProtocolError(
            Code.BAD_PUSH,
            f"The push starts from version {base}, this broker is at {current} of run "
            f"{current.run}; pull the current parameters first.",
        )


def check_sum(index: int, payload: Any, layout: FragmentLayout, wire: str) -> int:
    """Bytes of a relay's sum; raises ProtocolError if it is not a valid chunk."""
    if wire not in WIRE_DTYPES:
        raise ProtocolError(Code.BAD_CHUNK, f"Unknown wire dtype {wire:.20}.")
    return check_size(index, payload, layout, wire)


def check_size(index: int, payload: Any, layout: FragmentLayout, wire: str) -> int:
    """Bytes of the chunk; raises ProtocolError if its index or size is invalid."""
    if not 0 <= index < len(layout.spans):
        text = f"Invalid chunk {index}; fragment {layout.fragment} has {layout.chunks} chunks."
        raise ProtocolError(Code.BAD_CHUNK, text)
    span = layout.spans[index]
    size = int(payload.nbytes)
    most = span_bytes(span, wire)
    least = most if size == most else least_bytes(span, wire)
    if not least <= size <= most:
        wanted = f"{most}" if least == most else f"{least} to {most}"
        raise ProtocolError(
            Code.BAD_CHUNK,
            f"Chunk {index} has {size} bytes, it must have {wanted}: "
            f"{span.elements} elements in {travels_in(span.segment, wire)}.",
        )
    return size
