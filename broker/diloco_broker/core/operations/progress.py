"""How far the run is: what its rounds so far come to, told to each reader with each version.

A worker that comes late places its learning-rate schedule by the steps that the others have behind
them, and logs the loss of all.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median_low

from diloco_broker.core.state import RunState, Totals, UnreleasedVersion
from diloco_protocol.messages import Progress
from diloco_protocol.ranges import MOST


def with_version(state: RunState, made: UnreleasedVersion) -> Totals:
    """The totals once this version is released: everything that a version adds to them, at once.

    Each fragment is pushed once for the same steps, so steps and tokens of fragment 0 are counted. Of a
    round it is the median of its workers' steps: slow ones may make fewer, and one may say anything. In
    asynchronous mode it is the sum, of which each of the planned workers has made a part (`show`).
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
    """So far is the run before this round; readers are told so from now on."""
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
