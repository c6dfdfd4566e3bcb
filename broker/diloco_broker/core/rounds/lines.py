"""The log line of each round, and in asynchronous mode of each version with its pushes.

Hundreds of asynchronous pushes may be applied in a minute, so one line a second covers all versions
since the line before. These lines stay out of the feed's list of events, which has room for twenty.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco_broker.core.effects import CountedPush, Effects, info
from diloco_broker.core.rounds.round import Update
from diloco_broker.core.state import RunState, UntoldVersions

# Seconds between two lines of asynchronous mode, at least.
LINE_S = 1.0
NAMES_SHOWN = 5


def closed(state: RunState, ended: Update, pushes: Sequence[CountedPush]) -> Effects:
    whole = {each.worker_id for each in pushes if each.chunks.is_full}
    # The barrier does not contain a worker that has left since its push.
    expected = whole | (ended.barrier.expected if ended.barrier else set())
    absent = sorted(expected - whole)
    shown = ", ".join(absent[:NAMES_SHOWN])
    names = f", without {shown}{' ...' * (len(absent) > NAMES_SHOWN)}" if absent else ""
    which = f" (fragment {ended.fragment})" if state.config.num_fragments > 1 else ""
    yield info(
        f"Round {ended.number}{which} closed in {state.run_time - ended.opened_at:.1f} s: "
        f"{ended.averaged} of {len(expected)} expected workers averaged{names}."
    )


def applied(state: RunState, ended: Update, pushes: Sequence[CountedPush]) -> Effects:
    """Note a version of asynchronous mode, and log it if a line is due."""
    untold, report = state.untold, state.last_report
    assert report is not None
    which = f" of fragment {ended.fragment}" if state.config.num_fragments > 1 else ""
    untold.versions += 1
    untold.newest = f"version {report.version}{which}"
    for each in pushes:
        known = untold.staleness.get(each.worker_id, 0)
        untold.staleness[each.worker_id] = max(known, each.staleness)
    yield from applied_so_far(state)


def applied_so_far(state: RunState) -> Effects:
    """Log the versions since the last line, if that was long enough ago."""
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
    yield info(text, is_listed=False)


def _age(staleness: int) -> str:
    return f"{staleness} version{'s'[: staleness != 1]} old"
