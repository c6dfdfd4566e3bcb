"""Going on from a checkpoint: what a worker makes of the broker's version of each fragment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from diloco_protocol.version import ABSENT_REMEMBERED
from diloco_worker.session.events import VerifyPushes
from diloco_worker.session.news import Arrival
from diloco_worker.session.previous_life import SENT_BEFORE, names_unknown_push
from diloco_worker.sync.boundary import offer, poll
from diloco_worker.sync.fragment import Fragment, TrainingBase
from diloco_worker.sync.schedule import SchedulePlace
from diloco_worker.sync.state import SyncState


async def resume(
    state: SyncState, place: SchedulePlace, cycle_start: int, arrivals: Sequence[Arrival]
) -> None:
    """Go on with the cycle and pushes of a previous process; `arrivals` are the broker's versions."""
    schedule, fragments = state.schedule, state.fragments
    known = [known_pushes(state.worker_id, fragment) for fragment in fragments]
    for fragment, arrival in zip(fragments, arrivals, strict=True):
        news = compared(state.worker_id, fragment, arrival)
        if news is not None:
            fragment.take_in(news)
    schedule.resume(place, state.step, cycle_start, [each.number for each in state.by_age()])
    state.set_pace()
    kept = [f for f in fragments if f.reply is None or not f.reply.superseding]
    await poll(state)
    for fragment in kept:
        state.ports.notify(VerifyPushes(fragment.number, known[fragment.number]))
    pushes_in_flight = [each for each in state.by_age() if not each.is_over]
    for fragment in pushes_in_flight:
        offer(state, fragment, is_new=False)
    state.ports.log(
        f"Going on from a checkpoint at step {state.step}, {schedule.position(state.step)} steps into "
        f"the cycle, with {len(pushes_in_flight)} deltas in flight."
    )


def known_pushes(worker_id: str, base: Fragment | TrainingBase) -> frozenset[int]:
    """The pushes of a worker that the checkpoint takes into account in this fragment."""
    known = {counted.push_id for counted in base.ledger.pushes.get(worker_id, ())}
    if base.in_flight is not None:
        known.add(base.in_flight.push_id)
    return frozenset(known)


def compared(worker_id: str, base: Fragment | TrainingBase, arrival: Arrival) -> Arrival | None:
    """What the broker's version means for a worker that goes on from a checkpoint.

    None where what is in the model stays, with its base and its push; a version that contains the push;
    or one that takes the place of what is in the model.
    """
    ledger = arrival.released.ledger
    if arrival.version == base.version:
        return None
    if arrival.version.run != base.version.run:
        return replace(arrival, superseding=f"the run is {arrival.version.run} now")
    if names_unknown_push(ledger, worker_id, known_pushes(worker_id, base)):
        return replace(arrival, superseding=SENT_BEFORE)
    if worker_id not in ledger.pushes and len(ledger.pushes) >= ABSENT_REMEMBERED:
        return replace(arrival, superseding="the broker no longer knows whether they were counted")
    in_flight = base.in_flight
    if in_flight is not None and ledger.names_whole(worker_id, in_flight.push_id):
        return replace(arrival, counted=frozenset({in_flight.push_id}))
    return None
