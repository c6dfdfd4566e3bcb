"""Whether the run is held, and which clocks stop while it is.

The run is held while an operator has paused it, and at a hub with a standby while its lease has lapsed
or the standby is about to take over. A held run closes no round and does not end, so waits for the work
of a worker must not time out either. Their deadlines use `RunState.run_time`, which stops while the run
is held for any reason:

- the time of the last round, the time to leave after it, and `--max-time`;
- `--grace`, after a quorum or the first asynchronous push, and `--staging-deadline`;
- `--recover-wait`, and the patience with a worker that uploads its parameters.

Other deadlines use `RunState.now`, since a held run does not stop what they limit:

- silence, broken connections, and stalled training loops: a held run still receives heartbeats, and its
  workers train up to their next boundary. It must not wait later for workers that died in the meantime;
- commands of an operator: their deadline is for workers that wait for a round that does not close;
- the exit of the broker's process, which a supervisor would kill, and retries of checkpoints;
- exchanges with one peer (descriptions, probes, readers), and the rate limit of repeated log lines.

The lease itself uses the clock of the machine.
"""

from __future__ import annotations

from diloco_broker.core.events import Now
from diloco_broker.core.state import RunState
from diloco_broker.standby import fence


def is_held(state: RunState) -> bool:
    """Whether the run is held, as of the current event."""
    return state.paused_at is not None or fence.holds_rounds(state)


def advance(state: RunState, now: Now) -> None:
    """Advance the clocks; that of the run only if the run is not held.

    Pauses and leases begin with an event, so the run has been held since the last event if it is now. A
    lease that has lapsed since then counts as lapsed from that event on.
    """
    elapsed, state.now = now.core - state.now, now.core
    if state.standby is not None:
        state.standby.now = now.machine
    elif state.paused_at is None:
        return  # nothing else holds a run
    if is_held(state):
        state.held_s += elapsed
