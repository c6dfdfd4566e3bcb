"""How a relay passes a version of its parent's on: as what its closing round makes, under its own name.

Instead of an outer step the parent makes the version. Between the push of a site and the version that
has it the parent may have made others, so the counter, and with it the number of the round, may leap.
"""

from __future__ import annotations

from diloco_broker.core import effects, events
from diloco_broker.core.rules import rounds
from diloco_broker.core.state.run import RunState


def passed(state: RunState, event: events.Passed) -> effects.Effects:
    """The version is whole: readers get its chunks, and the next round opens."""
    round_, released = state.closing, event.released
    assert round_ is not None and round_.fragment == released.fragment
    state.versions.rename(released.fragment, released.version)
    state.parents, round_.number = released, released.round
    for index, wire in enumerate(event.wires):
        yield from rounds.stepped(state, events.Stepped(released.fragment, index, wire))
