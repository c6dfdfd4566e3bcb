"""What the core is told of the process that it runs in."""

from __future__ import annotations

from diloco_broker.core.effects import Effects
from diloco_broker.core.events import OuterGroups, Surroundings
from diloco_broker.core.state import RunState


def known(state: RunState, event: Surroundings) -> Effects:
    state.surroundings = event
    yield from ()


def outer_groups(state: RunState, event: OuterGroups) -> Effects:
    state.outer_groups = event.groups
    yield from ()
