"""What a relay says of itself: that it is here, what connections are over, the sums that it has made.

What it passes on is handled as if it came from the workers themselves; for the chunks that it holds see
`rounds.pushes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diloco_broker.core import effects, events
from diloco_broker.core.members import admission, liveness
from diloco_broker.core.relays import terms
from diloco_broker.core.relays.relay import Relay
from diloco_broker.core.relays.relays import Due
from diloco_broker.core.rounds import pushes
from diloco_broker.core.rounds.modes import rules_of
from diloco_broker.core.state import RunState
from diloco_broker.standby import fence
from diloco_protocol import messages
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.relays import way
from diloco_protocol.roles import Peer, Role

MOST_RELAYS = 256
# A relay says something each second. Another process that has its name takes its place after this.
SILENT_S = 3.0


def attach(state: RunState, route: effects.Route, attach: messages.Attach) -> effects.Effects:
    """A relay is here, on the first of its connections or the second."""
    if not state.config.relays:
        text = "This broker takes no relays; start it with --relays."
        raise ProtocolError(Code.NOT_ALLOWED, text)
    fence.check_join(state)
    relays = state.relays
    former = relays.named(attach.relay)
    if attach.token is not None:
        if former is None or former.token != attach.token or former.bulk is not None:
            raise ProtocolError(Code.NOT_ALLOWED, "This relay is not known; attach it again.")
        relays.bind(former, route)
        return
    if not messages.is_worker_id(attach.relay):
        text = f"The name of a relay has 1 to {messages.LONGEST_WORKER_ID} printable characters."
        raise ProtocolError(Code.BAD_HEADER, text)
    if former is None and len(relays) >= MOST_RELAYS:
        raise ProtocolError(Code.NOT_ALLOWED, f"There are {MOST_RELAYS} relays already.")
    is_another = former is not None and former.life != attach.life
    if former is not None and is_another and state.now - former.heard_at < SILENT_S:
        text = f"A relay named {attach.relay!r} is here already; give this one another --name."
        error = messages.Error(Code.ID_TAKEN, text, retry=True, about=attach.kind)
        yield effects.Send(route, error)
        return
    if former is not None:
        yield from gone(state, former, "it is back on new connections")
    token = state.draw().to_bytes(8, "big") + state.draw().to_bytes(8, "big")
    combines = terms.combines(state.config)
    relays.add(Relay(attach.relay, attach.life, route, token, state.now, combines))
    yield effects.info(f"Relay {attach.relay} is here.")
    yield effects.Send(route, terms.of(state, token))


def peer_gone(state: RunState, event: events.PeerGone) -> effects.Effects:
    """A connection does not exist any more: a worker's, or a relay's with all that are behind it."""
    # What could not be sent to somebody behind a relay could not be sent to the relay.
    relay = state.relays.on(event.route) or state.relays.before(event.route)
    if relay is not None:
        yield from gone(state, relay, "its connection broke")
    else:
        yield from liveness.connection_lost(state, event.route)


def over(state: RunState, route: effects.Route, gone: messages.Gone) -> effects.Effects:
    """A connection of a relay is over."""
    if state.relays.on(route) is not None:
        yield from liveness.connection_lost(state, way(route, gone.who))


def combined(
    state: RunState, relay: Relay, combined: messages.Combined, payload: Any
) -> effects.Effects:
    """A sum that was asked for."""
    asked = state.relays.collecting.get(combined.request)
    if asked is None or relay is not asked.relay:
        return  # the relay was given up meanwhile
    found = {n: asked.parts[n] for n in combined.numbers if n in asked.parts}
    if found:
        layout = state.versions[asked.fragment].layout
        try:
            size = pushes.check_sum(asked.index, payload, layout, combined.wire_dtype)
        except ProtocolError as error:  # nothing else would come of what it was asked for
            yield from gone(state, relay, f"it has sent what is no sum: {error}".rstrip("."))
            return
        state.totals.bytes_up += size
    del state.relays.collecting[combined.request]
    missing = [due for number, due in asked.parts.items() if number not in found]
    yield from _lost(state, asked.index, missing)
    rules, dtype = rules_of(state), combined.wire_dtype
    yield from rules.combined(state, replace(asked, parts=found), payload, dtype)


def gone(state: RunState, relay: Relay, why: str) -> effects.Effects:
    """A relay is gone: so are the connections through it, and the chunks that it held."""
    yield effects.warning(f"Relay {relay.name} is gone: {why}.")
    for route in (relay.control, relay.bulk):
        if route is not None:  # perhaps it has only slept, and does not know: so it connects again
            yield effects.Disconnect(route)
    asked = state.relays.remove(relay)
    for member in state.members:
        if member.relay is relay:
            yield from liveness.connection_lost(state, member.control)
    for push in state.pushes_in_progress:
        for index in [index for index, kept in push.kept.items() if kept.relay is relay]:
            yield from _lost(state, index, [Due(push, push.kept.pop(index))])
    for each in asked:
        yield from _lost(state, each.index, list(each.parts.values()))
        yield from rules_of(state).combined(state, replace(each, parts={}), None, "")


def _lost(state: RunState, index: int, due: Sequence[Due]) -> effects.Effects:
    """These chunks will not come. Workers that believe them to be here offer their pushes again."""
    for each in due:
        yield from rules_of(state).lost(state, each, index)
        member = state.members.named(each.push.worker_id)
        if member is not None and member.liveness.disconnected_at is None:
            text = "A relay that held a part of your push is gone; join again."
            yield member.tell(messages.Rejoin(state.epoch, text))


def revoked(state: RunState, event: events.KeysRevoked) -> effects.Effects:
    """Keys were taken back: relays that had one are gone at once, as are workers."""
    for relay in list(state.relays):
        if Peer(Role.RELAY, relay.name) in event.peers:
            yield from gone(state, relay, "its key was revoked")
    yield from admission.revoked(state, event)


def tick(state: RunState, *, lost: bool) -> effects.Effects:
    """Give up relays that are silent; where a connection was lost, find out whether it was one's."""
    timeout = state.config.heartbeat_timeout
    for relay in list(state.relays):
        silent = state.now - relay.heard_at
        if timeout and silent > timeout and not liveness.may_be_on_its_way(state):
            yield from gone(state, relay, f"nothing was heard from it for {silent:.0f} s")
        elif lost:
            yield effects.Send(relay.control, messages.Notice("alive"))
