"""Whom an open round of a site does not wait for: workers whose last push is for a later one.

A worker that waits for the version of one fragment sends no other. In a run of one broker that never
holds a round up, since workers come in with the round that is theirs. A site takes the rounds of its
parent, which may want an earlier one of it than those that its workers have sent for: where it came to
the parent between two rounds, or a push of it was refused. If the site waited for them, and the parent
for the site, all would wait for ever.
"""

from __future__ import annotations

from diloco_broker.core.rounds.round import Phase
from diloco_broker.core.state import RunState

# How long a round may lack them where nobody counts as stalled: `--stall-timeout 0`.
PATIENCE_S = 600.0


def let_go(state: RunState) -> bool:
    """Expect no more of them in the open round; a push of theirs that comes all the same is taken.

    Returns whether the round has nobody else, and nothing came for it: then the next one is their turn.
    """
    round_, pieces = state.round, state.config.num_fragments
    if not state.is_site or pieces == 1 or round_ is None or round_.barrier is None:
        return False
    # They may also be on their way to it: with a delay workers train on while a push is in flight.
    patience = state.config.stall_timeout or PATIENCE_S
    if round_.phase is Phase.CLOSING or state.run_time - round_.opened_at < patience:
        return False
    flight, record = state.flights.get(round_.fragment), state.versions[round_.fragment].record
    last = record.round if record.averaged else round_.fragment - pieces
    # What the parent wants of this fragment next.
    number = (last if flight is None else flight.number) + pieces
    later = {fragment for fragment, each in state.flights.items() if each.number > number}
    here = {s.worker_id for s in state.submissions.pool(round_.fragment).values() if not s.is_up}
    are_there = False
    for each in state.submissions:
        fragment = each.push.fragment
        waits = fragment in later if each.is_up else not each.is_chosen
        if fragment != round_.fragment and each.is_whole and waits and each.worker_id not in here:
            round_.barrier.expect_no_more(each.worker_id)
            are_there = are_there or not each.is_up
    return are_there and not here and not round_.barrier.expected - round_.barrier.skipped
