"""A relay's own messages: it attaches, reports closed connections, and answers requests for sums.

Messages that it forwards are handled as if the workers had sent them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diloco_broker.core import effects, events
from diloco_broker.core.members import admission, liveness
from diloco_broker.core.relays import combining, terms
from diloco_broker.core.relays.relay import Relay
from diloco_broker.core.rounds import pushes
from diloco_broker.core.rounds.modes import rules_of
from diloco_broker.core.rounds.round import RemoteChunk
from diloco_broker.core.state import RunState
from diloco_broker.standby import fence
from diloco_protocol import messages
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.relays import way
from diloco_protocol.roles import Peer, Role

MOST_RELAYS = 256
# A relay sends a message each second. After this long without one, another process may take its name.
SILENT_S = 3.0


def attach(state: RunState, route: effects.Route, attach: messages.Attach) -> effects.Effects:
    """A relay connects, with its control connection or its data connection."""
    if not state.config.relays:
        text = "This broker accepts no relays; start it with --relays."
        raise ProtocolError(Code.NOT_ALLOWED, text)
    fence.check_join(state)
    relays = state.relays
    former = relays.named(attach.relay)
    if attach.token is not None:
        if former is None or former.token != attach.token or former.bulk is not None:
            raise ProtocolError(Code.NOT_ALLOWED, "Unknown relay; attach it again.")
        relays.bind(former, route)
        return
    if state.knows(route):
        raise ProtocolError(Code.NOT_ALLOWED, "This connection is in use; attach on a new one.")
    if not messages.is_worker_id(attach.relay):
        text = f"The name of a relay has 1 to {messages.LONGEST_WORKER_ID} printable characters."
        raise ProtocolError(Code.BAD_HEADER, text)
    if former is None and len(relays) >= MOST_RELAYS:
        raise ProtocolError(Code.NOT_ALLOWED, f"There are {MOST_RELAYS} relays already.")
    is_another = former is not None and former.incarnation != attach.incarnation
    if former is not None and is_another and state.now - former.heard_at < SILENT_S:
        text = f"Another relay is named {attach.relay!r}; give this one another --name."
        error = messages.Error(Code.ID_TAKEN, text, retry=True, about=attach.kind)
        yield effects.Send(route, error)
        return
    if former is not None:
        yield from gone(state, former, "it reconnected")
    token = state.draw().to_bytes(8, "big") + state.draw().to_bytes(8, "big")
    combines = terms.combines(state.config)
    relays.add(Relay(attach.relay, attach.incarnation, route, token, state.now, combines))
    yield effects.info(f"Relay {attach.relay} attached.")
    yield effects.Send(route, terms.of(state, token))


def peer_gone(state: RunState, event: events.PeerGone) -> effects.Effects:
    """A connection broke: a worker's, or a relay's with all connections through it."""
    # A message to a worker could not be sent because its relay's connection broke.
    relay = state.relays.on(event.route) or state.relays.before(event.route)
    if relay is not None:
        yield from gone(state, relay, "its connection broke")
    else:
        yield from liveness.connection_lost(state, event.route)


def over(state: RunState, route: effects.Route, gone: messages.Gone) -> effects.Effects:
    """A relay reports that one of its connections was closed."""
    if state.relays.on(route) is not None:
        yield from liveness.connection_lost(state, way(route, gone.who))


def combined(
    state: RunState, relay: Relay, combined: messages.Combined, payload: Any
) -> effects.Effects:
    """A relay has answered a request for a sum."""
    asked = state.relays.collecting.get(combined.request)
    if asked is None or relay is not asked.relay:
        return  # the relay was declared dead in the meantime
    found = {n: asked.parts[n] for n in combined.numbers if n in asked.parts}
    if found:
        layout = state.versions[asked.fragment].layout
        try:
            size = pushes.check_sum(asked.index, payload, layout, combined.wire_dtype)
        except ProtocolError as error:  # a second request would be answered the same way
            yield from gone(state, relay, f"it sent an invalid sum: {error}".rstrip("."))
            return
        state.totals.bytes_up += size
    del state.relays.collecting[combined.request]
    for number, chunk in asked.parts.items():
        if number not in found:
            yield from _lost(state, chunk)
    answered = replace(asked, parts=found)
    yield from combining.combined(state, answered, payload, combined.wire_dtype)


def work_refused(state: RunState, event: events.WorkRefused) -> effects.Effects:
    """Tensor work found a chunk, or a sum of a relay, that is not finite."""
    if event.work.worker_id:
        yield from pushes.refused(state, event)
        return
    asked = combining.refused(state, event)
    for chunk in asked.parts.values():
        yield from _lost(state, chunk)
    if asked.relay in state.relays:
        yield from gone(state, asked.relay, "it sent a sum that is not finite")


def gone(state: RunState, relay: Relay, why: str) -> effects.Effects:
    """Drop a dead relay with the connections through it and the chunks that it held."""
    yield effects.warning(f"Relay {relay.name} is gone: {why}.")
    for route in (relay.control, relay.bulk):
        if route is not None:  # a relay that was only suspended has to reconnect
            yield effects.Disconnect(route)
    unanswered = state.relays.remove(relay)
    for member in state.members:
        if member.relay is relay:
            yield from liveness.connection_lost(state, member.control)
    for chunk in relay.held.values():
        if chunk.push.remote.pop(chunk.index, None) is not None:
            yield from _lost(state, chunk)
    for asked in unanswered:
        for chunk in asked.parts.values():
            yield from _lost(state, chunk)
        yield from combining.combined(state, replace(asked, parts={}), None, "")


def _lost(state: RunState, chunk: RemoteChunk) -> effects.Effects:
    """A chunk will not arrive. Its worker, which may believe that it has, joins and offers it again."""
    yield from rules_of(state).lost(state, chunk)
    member = state.members.named(chunk.push.worker_id)
    if member is not None and member.liveness.disconnected_at is None:
        text = "A relay that held a part of your push is gone; join again."
        yield member.tell(messages.Rejoin(state.epoch, text))


def revoked(state: RunState, event: events.KeysRevoked) -> effects.Effects:
    """Keys were revoked: drop the relays and workers that used one."""
    for relay in list(state.relays):
        if Peer(Role.RELAY, relay.name) in event.peers:
            yield from gone(state, relay, "its key was revoked")
    yield from admission.revoked(state, event)


def tick(state: RunState, *, lost: bool) -> effects.Effects:
    """Drop silent relays, release chunks, and probe relays where some connection was `lost`."""
    timeout = state.config.heartbeat_timeout
    for relay in list(state.relays):
        silent = state.now - relay.heard_at
        if timeout and silent > timeout and not liveness.may_be_on_its_way(state):
            yield from gone(state, relay, f"nothing was heard from it for {silent:.0f} s")
        elif lost:
            yield effects.Send(relay.control, messages.Notice("alive"))
    yield from combining.release_unused(state)
