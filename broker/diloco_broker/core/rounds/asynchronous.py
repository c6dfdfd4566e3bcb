"""Asynchronous mode: each submission makes an outer step as soon as it is complete.

There are no rounds. A few *admission slots* bound the number of submissions in progress; other pushes
are deferred until a slot is free. A submission without progress loses its slot to the next in the queue.
With a grace period (Liu et al. 2024, arXiv 2401.09135, algorithm 2) the first complete submission waits
for others; those of one fragment then make one version with a step each, so that their workers receive
the same parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from diloco_broker.config import BrokerConfig
from diloco_broker.core.effects import Effects, warning
from diloco_broker.core.events import WorkRefused
from diloco_broker.core.members.members import Member
from diloco_broker.core.rounds import collect, grants, lines, norms, staged
from diloco_broker.core.rounds.decision import Tally
from diloco_broker.core.rounds.round import Phase
from diloco_broker.core.rounds.submissions import StagedUpdate, Submission, Submissions
from diloco_broker.core.rounds.uploads import Upload, Window
from diloco_broker.core.state import RunState
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.errors import Code
from diloco_protocol.messages import Push

WAIT_TEXT = "All slots are taken; this push is next when one of them is free."


@dataclass
class AsyncUpdate(StagedUpdate):
    """A submission, or those of one grace period, applied to the fragment of the first."""

    submissions: Submissions = field(default_factory=Submissions)  # of all fragments

    @property
    def begun(self) -> set[str]:
        return {s.worker_id for s in self.chosen}

    @property
    def participating(self) -> set[str]:
        return {s.worker_id for s in self.submissions}

    def has_all_of(self, worker_id: str) -> bool:
        return any(s.is_whole for s in self.submissions if s.worker_id == worker_id)

    def apply(self, chosen: tuple[Submission, ...], size: int) -> None:
        self.phase = Phase.CLOSING
        self.chosen, self.fragment, self.size = chosen, chosen[0].push.fragment, size
        self.stepped = Bitmap(size)


find, done, commit = collect.find, collect.done, collect.commit
lost = collect.lost
tell = lines.applied


def room_needed(config: BrokerConfig, sizes: Sequence[int]) -> tuple[int, str, int]:
    """A submission in each slot; with a grace period complete ones wait outside the slots."""
    if config.fixed_grace:
        return staged.room_needed(config, sizes)
    return config.staging_slots, "slot", max(sizes)


def _update(state: RunState) -> AsyncUpdate:
    assert isinstance(state.round, AsyncUpdate)
    return state.round


def open_round(state: RunState, number: int) -> Effects:
    """Open the next update, with a provisional fragment until it is known what it applies."""
    if state.round is not None:
        collect.forget(state, _update(state).chosen)
    fragment, size = state.coming(number)
    state.round = AsyncUpdate(number, fragment, size, state.run_time, submissions=state.submissions)
    yield from ()


def offer(state: RunState, member: Member, push: Push) -> Effects:
    """Give an offered push a slot, or put it into the queue."""
    sharing = state.config.staging_slots
    if (yield from collect.comes_again(state, member, push, sharing=sharing)):
        return
    collect.abandon_others(state, member, push)
    queue = state.submissions.queue
    text = _too_old(state, member.worker_id, push)
    if text is not None:
        yield from _refuse(state, member, push, text)
    elif _may_send(state, member, push) and not queue:
        yield from collect.begin(state, member, push, sharing=sharing)
    else:
        place = (member.worker_id, push.fragment)
        if place not in queue:
            queue.append(place)
        yield from grants.wait(member, push, WAIT_TEXT, None)
        yield from _hand_out_slots(state)


def check(state: RunState, member: Member, push: Push) -> None:
    """Every push may be offered; `offer` refuses stale ones."""


def _refuse(state: RunState, member: Member, push: Push, text: str) -> Effects:
    """Refuse a push that is too stale to be applied."""
    member.take_deferred(push.fragment)
    member.uploads.begin(Upload(push, (Window(),) * member.processes))
    key = (member.worker_id, push.push_id)
    yield from grants.refuse(state, push.fragment, key, Code.STALE, text)


def _hand_out_slots(state: RunState) -> Effects:
    """Give free slots to the pushes at the head of the queue."""
    queue = state.submissions.queue
    for place in list(queue):
        worker_id, fragment = place
        member = state.members.named(worker_id)
        push = member.deferred.get(fragment) if member else None
        if member is None or push is None:
            queue.remove(place)  # its worker left, or reconnected and will offer it again
        elif _may_send(state, member, push):
            queue.remove(place)
            member.take_deferred(fragment)
            text = _too_old(state, worker_id, push)
            if text is not None:
                yield from _refuse(state, member, push, text)
            elif state.standing(member, push).is_full:
                yield from grants.counted(member, push)
            else:
                yield from collect.begin(state, member, push, sharing=state.config.staging_slots)


def _may_send(state: RunState, member: Member, push: Push) -> bool:
    """Whether a slot is free, and no complete push of this worker and fragment waits to be applied."""
    # With a grace period complete submissions wait for each other, so they must not occupy slots.
    has_grace = state.config.fixed_grace > 0
    taken = sum(not (has_grace and s.is_whole) for s in state.submissions)
    free = taken < state.config.staging_slots
    return free and not collect.has_whole(state, member, push)


def refused(state: RunState, event: WorkRefused) -> Effects:
    """A chunk was not finite: drop its push and free its slot."""
    yield from collect.refused(state, event)
    yield from _hand_out_slots(state)


def leave(state: RunState, worker_id: str) -> Effects:
    """A worker died or left: drop its incomplete submissions and free their slots."""
    collect.leave(state, worker_id)
    yield from _hand_out_slots(state)


do_without = leave  # no update waits for a worker


def tick(state: RunState) -> Effects:
    """Free the slots of submissions without progress, and log what is due."""
    if state.submissions.queue:
        yield from _take_back_slots(state)
        yield from _hand_out_slots(state)
    yield from lines.applied_so_far(state)


def _take_back_slots(state: RunState) -> Effects:
    for submission in list(state.submissions):
        silent = state.run_time - submission.progress_at
        if submission.is_whole or silent <= state.config.staging_deadline:
            continue
        state.submissions.drop(submission)
        worker_id, push = submission.worker_id, submission.push
        yield warning(
            f"The push of {worker_id} made no progress for {silent:.0f} s while others wait; moved it "
            "to the end of the queue."
        )
        member = state.members.named(worker_id)
        if member is not None:
            member.uploads.void(push.fragment, push.push_id)
            state.submissions.queue.append((worker_id, push.fragment))
            yield from grants.wait(member, push, WAIT_TEXT, None)


def look(state: RunState) -> Effects:
    """Refuse complete submissions that became too stale while others were applied."""
    if _update(state).phase is Phase.CLOSING:
        return
    for each in state.submissions.whole():
        text = _too_old(state, each.worker_id, each.push)
        if text is not None:
            state.submissions.drop(each)
            yield from grants.refuse(state, each.push.fragment, each.key, Code.STALE, text)
            yield from _hand_out_slots(state)


def tally(state: RunState) -> Tally:
    whole = state.submissions.whole()
    here = {each.worker_id for each in whole}
    enough_at = whole[0].whole_at if whole else None
    return Tally(len(here), False, len(state.members), enough_at)


def close(state: RunState) -> Effects:
    """Apply the submission that was complete first; refuse it if it is too large."""
    update, whole = _update(state), state.submissions.whole()
    fragment = whole[0].push.fragment
    together = [s for s in whole if s.push.fragment == fragment]
    chosen = tuple(together if state.config.fixed_grace > 0 else together[:1])
    kept = yield from norms.refuse_too_large(state, chosen)
    if len(kept) < len(chosen):
        yield from _hand_out_slots(state)
        return
    update.apply(chosen, state.versions[fragment].layout.chunks)
    groups = [[each] for each in chosen]
    yield from collect.merge(state, fragment, groups, partial(staleness_factor, state.config))


def staleness_factor(config: BrokerConfig, staleness: int) -> float:
    """The factor of the values of a push that is this many versions old; 1 for 0 versions.

    With `--outer cgad` the factor is gamma(s) exp(-a s), and gamma falls from 1 to 0 along a cosine
    (arXiv 2605.09126). A push beyond its cutoff is counted, and takes an outer step with zeros.
    """
    if config.outer_name == "cgad":
        at = min(1.0, staleness / config.cgad_cutoff_versions)
        return (1 + math.cos(math.pi * at)) / 2 * math.exp(-config.cgad_decay * staleness)
    return float((1 + staleness) ** -0.5) if config.staleness_weight == "poly" else 1.0


def _too_old(state: RunState, worker_id: str, push: Push) -> str | None:
    """Why this push is too stale to be applied; None if it is not."""
    limit = state.config.max_staleness
    staleness = state.versions[push.fragment].staleness(push)
    if limit is None or staleness <= limit:
        return None
    return (
        f"Dropped the push of {worker_id}: its base is {staleness} versions old, and --max-staleness is "
        f"{limit}. The worker continues from the newest version."
    )


def released(state: RunState) -> Effects:
    yield from _hand_out_slots(state)
