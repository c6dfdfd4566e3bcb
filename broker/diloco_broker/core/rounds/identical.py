"""Detection of workers whose updates are identical bit for bit because they read the same data.

No other figure shows this: losses fall, and the mean of equal updates has a healthy norm. Only updates
from the same version are compared: with different data they differ, and with the same data they are
equal, unless the devices compute differently. Pushes of zeros are ignored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from diloco_broker.core.effects import CountedPush, Effects
from diloco_broker.core.members.members import Member, SentUpdate
from diloco_broker.core.state import RunState
from diloco_protocol.monitor.verdict import identical_updates
from diloco_protocol.version import VersionId

CAUSE = "identical updates"  # in `Refusals`: it is said once a minute at most
REMEDY = "diloco.shard says which part of the data each worker is to read."


def counted(state: RunState, pushes: Sequence[CountedPush]) -> Effects:
    """A version with these pushes of one fragment is released: warn of workers with identical pushes."""
    bases: set[VersionId | None] = set()
    fragment = 0
    for each in pushes:
        member = state.members.named(each.worker_id)
        if member is not None and each.fingerprint:
            fragment = each.push.fragment
            member.figures.sent[fragment] = SentUpdate(each.push.base, each.fingerprint)
            bases.add(each.push.base)
    for base in bases:
        yield from _compare(state, fragment, base)


def _compare(state: RunState, fragment: int, base: VersionId | None) -> Effects:
    """Compare the last updates of all workers that made theirs from the same version."""
    groups: defaultdict[int, list[Member]] = defaultdict(list)
    for member in state.members:
        sent = member.figures.sent.get(fragment)
        if sent is not None and sent.base == base:
            groups[sent.fingerprint].append(member)
    for alike in groups.values():
        if len(alike) > 1:
            yield from _are_alike(state, sorted(alike, key=lambda member: member.worker_id))
        elif len(groups) > 1:
            alike[0].figures.same_as = None


def _are_alike(state: RunState, members: Sequence[Member]) -> Effects:
    first, second, *_ = ids = [member.worker_id for member in members]
    is_news = not all(member.figures.is_known_as_alike for member in members)
    for member in members:
        member.figures.same_as = second if member is members[0] else first
        member.figures.is_known_as_alike = True
    if is_news:
        yield from state.warn(CAUSE, f"{identical_updates(ids)} {REMEDY}")
