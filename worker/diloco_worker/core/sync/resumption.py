"""What a worker that goes on from a checkpoint makes of the broker's version of a fragment."""

from __future__ import annotations

from dataclasses import replace

from diloco_protocol.version import ABSENT_REMEMBERED
from diloco_worker.core.previous_life import SENT_BEFORE, names_unknown_push
from diloco_worker.core.sync.fragment import TrainingBase
from diloco_worker.core.sync.news import Arrival


def known_pushes(worker_id: str, base: TrainingBase) -> frozenset[int]:
    """The pushes of a worker that the checkpoint takes into account in this fragment."""
    known = {counted.push_id for counted in base.ledger.pushes.get(worker_id, ())}
    if base.flight is not None:
        known.add(base.flight.push_id)
    return frozenset(known)


def compared(worker_id: str, base: TrainingBase, arrival: Arrival) -> Arrival | None:
    """What the broker's version means for a worker that goes on from a checkpoint.

    Returns:
        None where what is in the model stays, with its base and its flight; a version that contains the
        flight; or one that takes the place of what is in the model.
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
    flight = base.flight
    if flight is not None and ledger.names_whole(worker_id, flight.push_id):
        return replace(arrival, counted=frozenset({flight.push_id}))
    return None
