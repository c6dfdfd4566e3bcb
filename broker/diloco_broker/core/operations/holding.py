"""Whether the run is held, and which clocks stand still while it is.

The run is held while an operator has paused it, and at a hub with a standby while its lease has lapsed
or the standby is about to take over. No round closes then and the run does not end, so no wait for the
work of a worker may run out either. The deadlines of such waits run on `RunState.run_time`, which stands
still while the run is held, whatever holds it:

- the time of the last round, the time to leave after it, and `--max-time`;
- `--grace`, after a quorum or the first asynchronous push, and `--staging-deadline`;
- `--recover-wait`, and the patience with a worker that uploads its parameters.

Other deadlines run on `RunState.now`, since what they are about goes on:

- silence, broken connections, and stalled training loops: a held run still receives heartbeats, and its
  workers train up to their next boundary. Workers that died meanwhile must not be waited for later;
- orders of an operator: their deadline is there for workers that wait for a round that does not close;
- the end of the broker's process, which a supervisor would kill, and retries of checkpoints;
- conversations with one peer (descriptions, probes, readers), and how often the log repeats itself.

The lease itself runs on the clock of the machine.
"""

from __future__ import annotations

from diloco_broker.core.events import Now
from diloco_broker.core.state import RunState
from diloco_broker.standby import fence


def is_held(state: RunState) -> bool:
    """As of the event at hand."""
    return state.paused_at is not None or fence.holds_rounds(state)


def advance(state: RunState, now: Now) -> None:
    """The clocks go on, and the run's with them unless the run is held.

    A pause and a lease begin with an event, so what is so now has been so since the last event. A lease
    that has lapsed since then counts as lapsed from that event on.
    """
    elapsed, state.now = now.core - state.now, now.core
    if state.standby is not None:
        state.standby.now = now.machine
    elif state.paused_at is None:
        return  # nothing else holds a run
    if is_held(state):
        state.held_s += elapsed
