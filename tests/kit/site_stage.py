"""A relay's site on the stage of the core: means go up, the parent's versions come down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diloco_broker.core import effects, events
from diloco_broker.core.state import Flight
from diloco_protocol.messages import Progress, Push, Released
from diloco_protocol.version import Counted, Ledger, VersionId
from kit.core_harness import Puppet, Stage, a_stage
from kit.noted_tensors import Wire

UP = 99  # the first push of the site; later ones count on


def as_site(stage: Stage) -> Stage:
    """From now on it has a parent, and its tensor work waits."""
    stage.state.parents = Released(0, VersionId("", 0, 0), Ledger())
    stage.by_hand = True
    return stage


def a_site(*worker_ids: str, **fields: Any) -> tuple[Stage, list[Puppet]]:
    """Workers at a site that have joined."""
    stage = a_stage(workers=len(worker_ids), relays=True, chunks=2, **fields)
    puppets = stage.joined(*worker_ids)
    return as_site(stage), puppets


def closes(stage: Stage, push_id: int = UP) -> Push:
    """Look at what has come; the mean of the update that closes goes up under this id."""
    queue = stage.tensors.queue
    while queue and isinstance(queue[0], effects.Inspect):
        stage.work(1)
    assert all(isinstance(each, effects.AggregateAndStep) for each in queue)
    round_ = stage.state.closing
    assert round_ is not None, "nothing closes"
    queue.clear()
    chosen = tuple(round_.pushes)
    contents = {each.worker_id: each.push.push_id for each in chosen}
    bases = [each.push.base for each in chosen if each.push.base is not None]
    oldest = min(bases, key=lambda base: base.counter)
    push: Push = replace(chosen[0].push, push_id=push_id, contents=contents, base=oldest)
    stage.happens_by_hand(events.SentUp(push))
    return push


def passes(
    stage: Stage, counter: int, *, fragment: int = 0, up: int | None = UP, **named: int
) -> Released:
    """The parent's version of this counter comes, in which these pushes are, and what is `up`."""
    before, pieces = stage.state.versions[fragment].ledger, stage.config.num_fragments
    pushes = {name: (Counted(push_id),) for name, push_id in named.items()}
    released = Released(
        fragment=fragment,
        version=VersionId(stage.version().run, counter, 77),
        ledger=Ledger({**before.pushes, **pushes}),
        round=(counter - 1) * pieces + fragment,
        averaged=9,
        progress=Progress(rounds=counter, steps=500),
        loss=1.5,
    )
    wires = tuple(Wire((("parent", index),)) for index in range(2))
    stage.happens_by_hand(events.Passed(released, wires, up))
    return released


def flights(stage: Stage) -> dict[int, Flight]:
    found: dict[int, Flight] = stage.state.flights
    return found
