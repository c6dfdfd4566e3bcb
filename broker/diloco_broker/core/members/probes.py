"""Somebody measures the way to the broker before joining: round trips, and bytes a second both ways."""

from __future__ import annotations

from hashlib import shake_128

from diloco_broker.core import effects
from diloco_broker.core.state import RunState
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.messages import LONGEST_PROBE, Probe

# What answers are filled with: nothing on the way can make it shorter.
_FILLING = memoryview(shake_128(b"probe").digest(LONGEST_PROBE))


def answer(state: RunState, route: effects.Route, probe: Probe) -> effects.Effects:
    """Answer at once, with as many bytes as are asked for."""
    if not 0 <= probe.answer <= LONGEST_PROBE:
        text = f"A probe is answered with {LONGEST_PROBE} bytes at most, not with {probe.answer}."
        raise ProtocolError(Code.BAD_HEADER, text)
    if state.relays.on(route) is None and not state.probes.take(state.now):
        text = "Too many measure the way to this broker at the same time; try again in two minutes."
        raise ProtocolError(Code.NOT_ALLOWED, text)
    payload = _FILLING[: probe.answer] if probe.answer else None
    yield effects.Send(route, Probe(probe.number), payload)
