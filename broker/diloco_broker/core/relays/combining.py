"""Chunks that relays hold: recorded, collected as sums, and released.

In a streaming round that is closing, the hub requests the mean of a chunk once no other worker of the
relay's site will send that chunk; until then the workers owe it. In rounds over complete pushes the hub
requests every chunk when it merges the pushes, and the chunk's outer step waits for the sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from diloco_broker.core import effects, events
from diloco_broker.core.effects import AggregateAndStep, Effects, Fold, WholePush
from diloco_broker.core.members.members import Member
from diloco_broker.core.relays.relay import Relay
from diloco_broker.core.relays.relays import Collecting, PendingStep
from diloco_broker.core.rounds.round import Phase, PushInProgress, RemoteChunk
from diloco_broker.core.rounds.streaming import StreamingRound, sum_folded
from diloco_broker.core.state import RunState
from diloco_protocol import messages
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.messages import Held

# Numbers in one message.
MOST_NUMBERS = 1024
# Messages that never end or complete a contribution: most of those in a closing round.
_IRRELEVANT = (
    messages.Heartbeat,
    messages.Credit,
    messages.Pull,
    messages.Lane,
    messages.Probe,
    messages.Combined,
)


# A relay reports a chunk.


def check(
    state: RunState, member: Member, route: effects.Route, push: messages.Push, held: Held
) -> None:
    """Raise ProtocolError where the relay of this connection must not hold a chunk of this push."""
    relay = state.relays.before(route)
    is_gradient = push.purpose is messages.Purpose.GRADIENT
    if relay is None or relay is not member.relay or not relay.combines or not is_gradient:
        raise ProtocolError(Code.BAD_CHUNK, "This chunk must be sent; a relay cannot hold it.")
    if held.squares is not None and held.number in relay.held:
        text = f"The relay holds another chunk with number {held.number}."
        raise ProtocolError(Code.BAD_CHUNK, text)


def is_usable(held: Held) -> bool:
    """Whether the relay could read the chunk, and found it finite."""
    return held.squares is not None and 0 <= held.squares < math.inf


def hold(state: RunState, member: Member, push: PushInProgress, index: int, held: Held) -> None:
    """Record a usable chunk that the worker's relay holds."""
    relay, squares = member.relay, held.squares
    assert relay is not None and squares is not None
    chunk = RemoteChunk(push, index, relay, held.number, held.nbytes, squares, held.fingerprint)
    relay.held[held.number] = chunk
    push.hold(chunk, state.run_time)


# The hub collects chunks.


def collect_due(state: RunState, event: events.Event) -> Effects:
    """Request what the event has made due of a closing streaming round; called after each event."""
    if not state.relays:
        return
    _note_unused(state, event)
    round_ = state.round
    if not isinstance(round_, StreamingRound) or round_.phase is Phase.OPEN:
        return
    indexes = _affected(event)
    if state.relays.collected != round_.number:
        state.relays.collected, indexes = round_.number, None
    if indexes is None:
        indexes = sorted({index for push in round_.pushes for index in push.remote})
    for index in indexes:
        for relay, chunks in _due(state, round_, index):
            yield state.relays.collect(relay, round_.fragment, chunks)


def _affected(event: events.Event) -> Iterable[int] | None:
    """Chunks that the event may have made due; None: any."""
    match event:
        case events.Received(message=messages.Chunk(index=index), payload=payload):
            is_voiding = isinstance(payload, Held) and not is_usable(payload)
            return None if is_voiding else (index,)
        case events.Received(message=message) if isinstance(message, _IRRELEVANT):
            return ()
        case events.WorkDone() | events.Stepped() | events.Saved():
            return ()
    return None


def _due(
    state: RunState, round_: StreamingRound, index: int
) -> Iterator[tuple[Relay, list[RemoteChunk]]]:
    """Relays that hold this chunk and will receive no more of it."""
    waits: set[Relay | None] = set()
    found: dict[Relay, list[RemoteChunk]] = {}
    for push in round_.pushes:
        if (chunk := push.remote.get(index)) is not None:
            found.setdefault(chunk.relay, []).append(chunk)
        elif push.ended is None and index not in push.held:
            member = state.members.named(push.worker_id)
            waits.add(None if member is None else member.relay)
    for relay, chunks in found.items():
        if relay not in waits:
            yield relay, sorted(chunks, key=lambda each: each.push.key)


def with_sums(
    state: RunState, steps: Iterable[AggregateAndStep], pushes: Sequence[PushInProgress]
) -> Effects:
    """Take the outer steps of these complete pushes, each once relays have sent what they hold of it."""
    pushes = [each for each in pushes if each.remote]
    for step in steps:
        found: dict[str, list[RemoteChunk]] = {}
        for push in pushes:
            if (chunk := push.remote.get(step.index)) is not None:
                found.setdefault(chunk.relay.name, []).append(chunk)
        if not found:
            yield step
            continue
        state.relays.steps[step.index] = PendingStep(step, len(found))
        for name in sorted(found):
            yield state.relays.collect(found[name][0].relay, step.fragment, found[name])


# Sums arrive.


def combined(state: RunState, asked: Collecting, payload: Any, dtype: str) -> Effects:
    """A relay has sent the mean of `asked.parts`, or will send nothing if there are none."""
    index, weight = asked.index, sum(each.push.weight for each in asked.parts.values())
    if isinstance(state.round, StreamingRound):
        if asked.parts:
            state.relays.adding[asked.request] = asked
            state.chunks_waiting += 1
            yield Fold(asked.fragment, index, "", asked.request, weight, dtype, payload)
        return
    pending = state.relays.steps[index]
    if asked.parts:
        pending.sums.append(
            WholePush(
                worker_id=asked.relay.name,
                push_id=asked.request,
                weight=weight,
                scale=1.0,
                norm=0.0,
                wire_dtype=dtype,
                payloads={index: payload},
            )
        )
    pending.pending -= 1
    if not pending.pending:
        yield _complete(state.relays.steps.pop(index))


def _complete(pending: PendingStep) -> AggregateAndStep:
    step = pending.step
    (pushes,), index = step.wholes, step.index
    own = [each for each in pushes if not isinstance(each.payloads[index], RemoteChunk)]
    # In an order that does not depend on which sum arrived first.
    sums = sorted(pending.sums, key=lambda each: each.worker_id)
    return AggregateAndStep(step.fragment, step.index, ((*own, *sums),), step.count)


def added(state: RunState, event: events.WorkDone) -> Effects:
    """A sum has been added to a streaming round: each of its parts counts."""
    for each in state.relays.adding.pop(event.work.push_id).parts.values():
        yield from sum_folded(state, each)


def refused(state: RunState, event: events.WorkRefused) -> Collecting:
    """A sum was not finite, though its parts were: the relay is at fault. Returns the request."""
    state.chunks_waiting -= 1
    return state.relays.adding.pop(event.work.push_id)


# Chunks that will not be collected.


def _note_unused(state: RunState, event: events.Event) -> None:
    """Note a chunk that a relay reported and that was not accepted, so that it can free it."""
    if isinstance(event, events.Received) and isinstance(event.payload, Held):
        relay, held = state.relays.before(event.route), event.payload
        if relay is not None and held.squares is not None and held.number not in relay.held:
            relay.unused.append(held.number)


def release_unused(state: RunState) -> Effects:
    """Release chunks at relays that will not be collected."""
    pushes = set(state.pushes_in_progress) if state.relays else set()
    for relay in state.relays:
        for number in [n for n, each in relay.held.items() if each.push not in pushes]:
            del relay.held[number]
            relay.unused.append(number)
        while relay.unused:
            batch, relay.unused = relay.unused[:MOST_NUMBERS], relay.unused[MOST_NUMBERS:]
            yield effects.Send(relay.control, messages.Forget(tuple(batch)))
