"""Progress of the run: totals over its rounds, sent to each reader with each version.

A worker that joins late positions its learning-rate schedule by the steps of the run, and logs the mean
loss of all workers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median_low

from diloco_broker.core.state import RunState, Totals, UnreleasedVersion
from diloco_protocol.messages import Progress
from diloco_protocol.ranges import MOST


def with_version(state: RunState, made: UnreleasedVersion) -> Totals:
    """Compute the totals as of the release of this version.

    Each fragment is pushed once for the same steps, so only pushes of fragment 0 count. The steps of a
    round are the median over its workers: slow ones may make fewer, and one may report anything. In
    asynchronous mode they are the sum, which `show` divides by the planned number of workers.
    """
    before = state.totals
    pushes = [each.push for each in made.pushes if each.chunks.is_full]
    steps = tokens = 0
    if made.ended.fragment == 0 and pushes:
        told = [push.steps for push in pushes]
        steps = sum(told) if state.config.is_async else median_low(told)
        tokens = sum(push.tokens for push in pushes)
    return replace(
        before,
        rounds=before.rounds + 1,
        contributions=before.contributions + len(pushes),
        steps=min(before.steps + steps, MOST),
        tokens=min(before.tokens + tokens, MOST),
    )


def show(state: RunState, number: int) -> None:
    """Set the progress that readers receive, as of before this round."""
    totals, report, versions = state.totals, state.last_report, state.versions
    steps, loss = totals.steps, None if report is None else report.loss
    if state.config.is_async:
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
