"""How long pseudo-gradients are: measured, compared with those of the other workers, bounded.

A worker may say of its push whatever it likes; the length that counts is that of the bytes that came.
What is usual for a fragment is the median over the workers that are here of the length of the last whole
push of each, refused ones included. So every worker has one vote, however often it pushes, and when
all of them begin to make longer steps, as in a warm-up, the bound follows as soon as most have pushed.
Nothing of this is saved: a broker that comes back has it again after a push of each worker.
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
# Of two lengths nobody can tell which is the odd one.
VOTES_NEEDED = 3


def usual(state: RunState, fragment: int) -> float | None:
    """The median; None while fewer than three workers have sent anything but zeros."""
    votes = [norm for each in state.members if (norm := each.figures.norms.get(fragment))]
    return median(votes) if len(votes) >= VOTES_NEEDED else None


def refuse_too_large(
    state: RunState, due: Sequence[Submission]
) -> Generator[Effect, None, list[Submission]]:
    """Refuse those that are longer than the run takes; returns the others. All are whole."""
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
    """Why a submission is refused; None where it is not."""
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
        f"The pseudo-gradient of {found.worker_id} has norm {found.norm:.4g}; this run takes at most "
        f"{bound:.4g}, {how}. Nothing of it counts. Look for a learning rate or data there that others "
        "do not have; if all its work is like that, give the broker a larger --max-delta-norm."
    )


def counted(state: RunState, pushes: Sequence[effects.CountedPush]) -> Effects:
    """A version with these is out: remember how long they were, and name those that stand out."""
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
    if state.config.aggregate == "mean":
        return "it counts in full (--max-delta-norm and --aggregate can bound it)"
    return f"--aggregate {state.config.aggregate} bounds what it does"


def _is_measured(state: RunState, worker_id: str, fragment: int, norm: float) -> None:
    member = state.members.named(worker_id)
    if member is not None:
        member.figures.is_measured(fragment, norm)
