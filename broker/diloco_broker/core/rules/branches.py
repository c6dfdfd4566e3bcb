"""Branches of a run: rounds that a worker has and this broker has not.

A broker that comes back from an older copy, or before a worker that was ahead of it, makes rounds that
were made already, with other contributions. Counters then say the same and tags differ. Nothing can join
the two again: the broker's branch is the run, and people are told what becomes of the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco_broker.core import effects
from diloco_broker.core.state.run import RunState
from diloco_protocol.version import VersionId


def tell(state: RunState, worker_id: str, versions: Sequence[VersionId | None]) -> effects.Effects:
    """Say it if a worker holds a version, by fragment, that this broker's rounds do not come from."""
    fragments = state.versions.trained
    for fragment, (held, each) in enumerate(zip(versions, fragments, strict=False)):
        ours = each.version
        if held is None or ours is None or held.run != ours.run:
            continue
        which = f" of fragment {fragment}" if len(fragments) > 1 else ""
        if held.counter > ours.counter:
            yield effects.warning(
                f"{worker_id} holds version {held}{which}, but this broker went on from an older copy "
                f"and is at {ours}. The rounds that only {worker_id} has are lost, except for what "
                "workers offer again.",
            )
        elif each.is_of_another_branch(held):
            yield effects.warning(
                f"{worker_id} holds version {held}{which}, which is of another branch of run "
                f"{ours.run}: this broker, now at {ours}, has version {each.name_of(held.counter)} "
                f"instead, because a broker went on from an older copy. The rounds that only "
                f"{worker_id} has are lost; it goes on with this broker's parameters, and offers "
                "again what it has not seen counted.",
            )
