"""Probes: peers measure round trips and bandwidth to the broker before they join."""

from __future__ import annotations

from hashlib import shake_128

from diloco_broker.core import effects
from diloco_broker.core.state import RunState
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.messages import LONGEST_PROBE, Probe

# The payload of answers: random bytes, which no compression on the link can shorten.
_FILLING = memoryview(shake_128(b"probe").digest(LONGEST_PROBE))


def answer(state: RunState, route: effects.Route, probe: Probe) -> effects.Effects:
    """Answer a probe with the requested number of bytes."""
    if not 0 <= probe.answer <= LONGEST_PROBE:
        text = f"The answer to a probe may have 0 to {LONGEST_PROBE} bytes, got {probe.answer}."
        raise ProtocolError(Code.BAD_HEADER, text)
    if state.relays.on(route) is None and not state.probes.take(state.now):
        text = "Too many concurrent bandwidth probes; try again in two minutes."
        raise ProtocolError(Code.NOT_ALLOWED, text)
    payload = _FILLING[: probe.answer] if probe.answer else None
    yield effects.Send(route, Probe(probe.number), payload)
