"""The log's line for each round: how it closed; in asynchronous mode, whose push a version contains.

Hundreds of asynchronous pushes may be applied in a minute. Then a line tells of all that came since the
one before, a second ago. These lines stay out of the feed's list of events, which has room for twenty.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco_broker.core import effects
from diloco_broker.core.state.run import RunState, UntoldVersions
from diloco_broker.core.state.staged_round import StagedRound
from diloco_broker.core.state.streaming_round import Counting, Round

# Least seconds between two lines of asynchronous mode.
LINE_S = 1.0
NAMES_SHOWN = 5


def add_untold(state: RunState, newest: str, counting: Sequence[Counting]) -> effects.Effects:
    """One more version of asynchronous mode; `newest` names it."""
    untold = state.untold
    untold.versions += 1
    untold.newest = newest
    for each in counting:
        known = untold.staleness.get(each.worker_id, 0)
        untold.staleness[each.worker_id] = max(known, each.staleness)
    yield from tell(state)


def tell(state: RunState) -> effects.Effects:
    """A line, if there is something to tell and the last one was long enough ago."""
    untold, now = state.untold, state.now
    if not untold.versions or (untold.told_at is not None and now - untold.told_at < LINE_S):
        return
    names = sorted(untold.staleness)
    others = f" and {len(names) - NAMES_SHOWN} more" * (len(names) > NAMES_SHOWN)
    if untold.versions == 1:
        shown = [f"{name} ({_age(untold.staleness[name])})" for name in names[:NAMES_SHOWN]]
        text = f"{untold.newest.capitalize()} contains the push of {', '.join(shown)}{others}."
    else:
        text = (
            f"{untold.versions} versions, the last of them {untold.newest}, contain pushes of "
            f"{', '.join(names[:NAMES_SHOWN])}{others}, at most "
            f"{_age(max(untold.staleness.values(), default=0))}."
        )
    state.untold = UntoldVersions(told_at=now)
    yield effects.Log("info", text, is_listed=False)


def _age(staleness: int) -> str:
    return f"{staleness} version{'s'[: staleness != 1]} old"


def closed(
    ended: Round | StagedRound, counting: Sequence[Counting], pieces: int, now: float
) -> effects.Log:
    """How a round of synchronous mode closed."""
    whole = {each.worker_id for each in counting if each.chunks.is_full}
    absent = sorted(ended.expected - whole)
    shown = ", ".join(absent[:NAMES_SHOWN])
    names = f", without {shown}{' ...' * (len(absent) > NAMES_SHOWN)}" if absent else ""
    which = f" (fragment {ended.fragment})" if pieces > 1 else ""
    return effects.Log(
        "info",
        f"Round {ended.number}{which} closed in {now - ended.opened_at:.1f} s: "
        f"{ended.averaged} of {len(ended.expected)} expected workers averaged{names}.",
    )
