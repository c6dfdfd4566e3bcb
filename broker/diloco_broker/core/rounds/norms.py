"""Norms of pseudo-gradients: measured, compared with those of the other workers, bounded.

The norm that counts is measured from the received chunks, not the one that the worker reports. The usual
norm of a fragment is the median over the members of the norm of the last complete push of each,
including refused ones. So every worker has one vote, however often it pushes, and when all workers begin
to make longer steps, as in a warm-up, the bound follows as soon as most have pushed. The norms are not
saved: a restarted broker has them again after a push of each worker.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from statistics import median

from diloco_broker.config.declaration import AUTO
from diloco_broker.core import effects
from diloco_broker.core.effects import Effect, Effects
from diloco_broker.core.rounds import grants
from diloco_broker.core.rounds.submissions import Submission
from diloco_broker.core.state import RunState
from diloco_protocol.errors import Code

# With Dynamic Local Updates on devices of .58 to 3.33 steps a second the fastest of four makes three
# times the steps of the median one.
TIMES_USUAL = 5.0
# Two norms do not show which one is the outlier.
VOTES_NEEDED = 3


def usual(state: RunState, fragment: int) -> float | None:
    """The median norm; None while fewer than three workers have sent a non-zero push."""
    votes = [norm for each in state.members if (norm := each.figures.norms.get(fragment))]
    return median(votes) if len(votes) >= VOTES_NEEDED else None


def refuse_too_large(
    state: RunState, due: Sequence[Submission]
) -> Generator[Effect, None, list[Submission]]:
    """Refuse complete submissions beyond `--max-delta-norm`; returns the others."""
    limit = state.config.max_delta_norm
    if limit is None:
        return list(due)
    for each in due:
        _is_measured(state, each.worker_id, each.push.fragment, each.norm)
    kept = []
    for each in due:
        text = _too_large(state, each)
        if text is None:
            kept.append(each)
            continue
        fragment = each.push.fragment
        state.submissions.drop(each)
        state.skip(each.worker_id, fragment)
        yield from grants.refuse(state, fragment, each.key, Code.TOO_LARGE, text)
    return kept


def _too_large(state: RunState, found: Submission) -> str | None:
    """Why a submission is too large; None if it is not."""
    limit, middle = state.config.max_delta_norm, None
    if limit == AUTO:
        middle = usual(state, found.push.fragment)
        if middle is None:
            return None
        bound = TIMES_USUAL * middle
        how = f"{TIMES_USUAL:g} times the workers' median (--max-delta-norm auto)"
    else:
        assert limit is not None and not isinstance(limit, str)
        bound, how = limit, "--max-delta-norm"
    if found.norm <= bound:
        return None
    return (
        f"Dropped the pseudo-gradient of {found.worker_id}: its norm is {found.norm:.4g}, and at most "
        f"{bound:.4g} is allowed ({how}). Check the learning rate and the data of this worker; if its "
        "pushes are legitimate, raise --max-delta-norm."
    )


def counted(state: RunState, pushes: Sequence[effects.CountedPush]) -> Effects:
    """A version with these pushes is released: record their norms, and warn of outliers."""
    measured = [each for each in pushes if each.norm is not None]
    for each in measured:
        _is_measured(state, each.worker_id, each.push.fragment, each.norm or 0.0)
    if not measured:
        return
    middle = usual(state, measured[0].push.fragment)
    for each in measured if middle is not None else ():
        assert middle is not None and each.norm is not None
        if each.norm > TIMES_USUAL * middle:
            what = _what_became_of_it(state)
            text = (
                f"The pseudo-gradient of {each.worker_id} has norm {each.norm:.4g}, "
                f"{each.norm / middle:.3g} times the workers' median, {middle:.4g}; {what}."
            )
            yield from state.warn(f"norm of {each.worker_id}", text)


def _what_became_of_it(state: RunState) -> str:
    if state.config.aggregate in ("mean", "rda"):  # rda bounds the direction, not the length
        return "it counts in full (--max-delta-norm and --aggregate can bound it)"
    return f"--aggregate {state.config.aggregate} bounds what it does"


def _is_measured(state: RunState, worker_id: str, fragment: int, norm: float) -> None:
    member = state.members.named(worker_id)
    if member is not None:
        member.figures.is_measured(fragment, norm)
