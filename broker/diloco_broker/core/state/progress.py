"""How far the run is: what its rounds so far come to, told to each reader with each version.

A worker that comes late places its learning-rate schedule by the steps that the others have behind
them, and logs the loss of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low

from diloco_broker.core.effects import CountedPush
from diloco_broker.core.state.run import RunState
from diloco_protocol.messages import Progress
from diloco_protocol.ranges import MOST


def count(state: RunState, fragment: int, pushes: Sequence[CountedPush]) -> None:
    """A version of the fragment has these pushes: add up steps and tokens.

    Each fragment is pushed once for the same steps, so those of fragment 0 are counted. Of a round it is
    the median of its workers' steps: slow ones may make fewer, and one may say anything. In
    asynchronous mode it is the sum, of which each of the planned workers has made a part (`show`).
    """
    whole = [each.push for each in pushes if each.chunks.is_full]
    if fragment != 0 or not whole:
        return
    totals, steps = state.totals, [push.steps for push in whole]
    made = sum(steps) if _has_no_rounds(state) else median_low(steps)
    totals.steps = min(totals.steps + made, MOST)
    totals.tokens = min(totals.tokens + sum(push.tokens for push in whole), MOST)


def show(state: RunState, number: int) -> None:
    """So far is the run before this round; readers are told so from now on.

    A relay knows its own site only, and tells what its parent says.
    """
    if state.parents is not None:
        state.versions.progress = state.parents.progress or Progress()
        state.versions.loss = state.parents.loss
        return
    totals, report, versions = state.totals, state.last_report, state.versions
    steps, loss = totals.steps, None if report is None else report.loss
    if _has_no_rounds(state):
        steps //= state.config.workers
        told = [each.figures.loss for each in state.members]
        losses = [each for each in told if each is not None and math.isfinite(each)]
        loss = sum(losses) / len(losses) if losses else None
    versions.progress = Progress(
        min(number, MOST),
        steps,
        totals.tokens,
        totals.open_s,
        state.config.max_rounds,
        state.config.token_budget,
        state.config.max_seconds,
    )
    versions.loss = loss if loss is not None and math.isfinite(loss) else None


def _has_no_rounds(state: RunState) -> bool:
    return state.run_config.mode == "async"
