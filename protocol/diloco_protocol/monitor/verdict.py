"""The verdict on a run, with reasons: the same for every display, metric and exit code. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from diloco_protocol.feed import DEAD, Snapshot, Worker
from diloco_protocol.quantities import duration, plural

NAMES = 5  # of workers in one sentence


@dataclass(frozen=True)
class Verdict:
    """The verdict, with one sentence for each reason.

    `word` is "healthy"; "waiting" before the first round without a problem; "ended" once all workers
    have left as done; else "degraded".
    """

    reasons: tuple[str, ...] = ()
    word: str = "healthy"

    @property
    def healthy(self) -> bool:
        """No problem, and training needs no intervention to continue."""
        return self.word in ("healthy", "ended")

    def first(self, most: int) -> list[str]:
        """The reasons; of more than `most` the first, and in place of the others their number."""
        if len(self.reasons) <= most:
            return list(self.reasons)
        return [*self.reasons[: most - 1], f"and {len(self.reasons) - most + 1} more"]


def verdict_on(snapshot: Snapshot, others: Sequence[str] = ()) -> Verdict:
    """The verdict on one snapshot.

    Args:
        others: other problems, such as a silent broker; they come first.
    """
    reasons = [*others, *_of_the_broker(snapshot)]
    listed = snapshot.workers if _is_over(snapshot) else snapshot.listed
    for worker in sorted(listed, key=lambda w: w.id):
        reasons += _of_a_worker(worker)
    reasons += _alike(snapshot)
    if not reasons:
        return Verdict((_ending(snapshot),), "ended") if snapshot.ended else Verdict()
    waits = reasons == _waiting(snapshot) and not _has_begun(snapshot)
    return Verdict(tuple(reasons), "waiting" if waits else "degraded")


def _of_the_broker(snapshot: Snapshot) -> list[str]:
    floor = snapshot.round.floor if snapshot.round else 0
    saved, alive = snapshot.checkpoint, snapshot.counts.alive
    if snapshot.state == "stopping":
        return ["the broker is stopping"]
    if snapshot.state == "paused":
        paused = f"the run is paused, for {duration(snapshot.paused_for_s or 0.0)}"
        return [paused, *(_waiting(snapshot) if snapshot.waiting_for else ())]
    if saved is not None and saved.error is not None:
        return [f"no checkpoint can be written: {saved.error}"]
    if snapshot.state == "waiting":
        return [] if snapshot.ended else _waiting(snapshot)
    if alive < floor:
        return [f"the run waits for workers: {alive} present, the round needs {floor}"]
    due = snapshot.counts.due
    dead = sum(each.health == DEAD for each in snapshot.listed)
    if alive + dead < due and _has_begun(snapshot) and not _is_over(snapshot):
        return [f"{alive} of {due} workers are present"]
    return []


def _of_a_worker(worker: Worker) -> Iterator[str]:
    if worker.health != "ok":
        why = f": {worker.warning}" if worker.health == DEAD and worker.warning else ""
        heard = f"last heard {duration(worker.beat_age_s)} ago"
        yield f"{worker.id} is {worker.health}, {heard}{why}"
    if worker.health != DEAD and not (worker.loss_is_finite and math.isfinite(worker.loss or 0.0)):
        yield f"the loss of {worker.id} is not finite"


def _alike(snapshot: Snapshot) -> list[str]:
    """One sentence for each group of workers that sent identical updates.

    In the feed all of a group name its first, which names another.
    """
    groups: dict[str, set[str]] = {}
    for worker in snapshot.workers:
        if worker.same_as is not None:
            pair = {worker.id, worker.same_as}
            groups.setdefault(min(pair), set()).update(pair)
    return [identical_updates(sorted(groups[first])) for first in sorted(groups)]


def identical_updates(ids: Sequence[str]) -> str:
    """The sentence for two or more workers that sent identical updates."""
    shown = list(ids) if len(ids) <= NAMES else [*ids[: NAMES - 1], f"{len(ids) - NAMES + 1} more"]
    names = f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"{names} sent identical updates; do they read the same data?"


def _is_over(snapshot: Snapshot) -> bool:
    """No further version is needed, so absent workers are not missing."""
    return snapshot.ended or (snapshot.end is not None and snapshot.end.is_over)


def _waiting(snapshot: Snapshot) -> list[str]:
    return [f"the run waits {snapshot.waiting_for or 'for workers'}"]


def _has_begun(snapshot: Snapshot) -> bool:
    """Whether a version was made."""
    return any(part.version for part in snapshot.fragments)


def _ending(snapshot: Snapshot) -> str:
    """The reason of "ended". Totals are of this incarnation of the broker, and may be 0."""
    totals = snapshot.totals
    made = plural(totals.rounds, "round")
    if snapshot.mode == "async":
        made = plural(totals.contributions, "push", "pushes")
    return "all workers have left" + (f", after {made}" if made[0] != "0" else "")
