"""What a worker needs to go on as if it had not been restarted.

The script keeps model and optimizer; this is the rest. For each fragment: the version that its delta is
measured from (*base*), with its ledger; what was done since its last freeze; and the delta in flight, if
there is one, under its push id. Size: one fp32 copy of the model; with a delta in flight, 1/2 (bf16) to
1 more of its fragment, and 1 more where the merge is "rebase" or training no longer waited for it. With
deltas in few bits 1 more for the residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from diloco_protocol import UsageError
from diloco_protocol.manifest import summarise
from diloco_worker.model.checksums import differing
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.spread.shares import tensor_name
from diloco_worker.session.compatibility import Terms
from diloco_worker.session.downloads import Held
from diloco_worker.sync.fragment import TrainingBase
from diloco_worker.sync.merge import DeltaValues, SavedFeedback
from diloco_worker.sync.schedule import SchedulePlace


@dataclass(frozen=True)
class SavedFragment:
    """One fragment as training stands on it."""

    base: TrainingBase
    values: FlatState  # of the base
    delta: DeltaValues | None = None  # of the in-flight push, if there is one
    feedback: SavedFeedback | None = None  # where deltas travel in few bits


@dataclass(frozen=True)
class Resumption:
    """What a worker goes on from."""

    worker_id: str
    terms: Terms  # how the run was trained and the model cut
    place: SchedulePlace  # in the cycle of slots and the sequence of rounds
    frozen: Held | None  # the version of the frozen parameters, where there are any
    fragments: tuple[SavedFragment, ...]  # in order
    # Of the pieces of the model's tensors, by name (`model.checksums`).
    checksums: Mapping[str, tuple[int, ...]]

    @property
    def held(self) -> dict[int, Held]:
        """By fragment, the versions that are held."""
        held = {
            part.fragment: Held(each.base.version, each.base.ledger)
            for part, each in zip(self.terms.layout.fragments, self.fragments, strict=True)
        }
        if self.frozen is not None:
            held[self.terms.layout.frozen.fragment] = self.frozen
        return held

    @property
    def states(self) -> dict[int, FlatState]:
        """By fragment, the values of these versions; frozen ones are in the model."""
        return {each.values.layout.fragment: each.values for each in self.fragments}

    @property
    def moment(self) -> list[Any]:
        """Plain values that no other moment of any worker has."""
        bases = [each.base for each in self.fragments]
        pushes_in_flight = [base.in_flight and base.in_flight.push.push_id for base in bases]
        versions = [base.version.plain() for base in bases]
        return [self.worker_id, asdict(self.place), versions, pushes_in_flight]

    def check_model(self, tensors: ModelTensors) -> None:
        """Raise UsageError when this is not the model that the checkpoint was written with.

        Its distance from the base would be pushed as if it had been trained.
        """
        names = differing(tensors, self.checksums)
        if names:
            compared = len({tensor_name(name) for name in self.checksums})
            raise UsageError(
                "The model is not as it was when this worker's state was taken: "
                f"{len(names)} of {compared} tensors differ ({summarise(names)}); load "
                "the model's own checkpoint of that moment before the worker starts."
            )
