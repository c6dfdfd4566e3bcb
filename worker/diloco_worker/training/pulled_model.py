"""The model as a client has pulled it: versions of all fragments, by the names of a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco_protocol import Ledger, Manifest, Segment, UsageError, VersionId
from diloco_protocol.chunks import FragmentLayout
from diloco_worker.model.flat_state import FlatState
from diloco_worker.session.compatibility import Terms
from diloco_worker.session.news import Arrival
from diloco_worker.transport.link import Link


@dataclass(frozen=True)
class GlobalParameters:
    """One version of the global parameters."""

    version: VersionId  # with fragments that of fragment 0
    # Every entry of the model's `state_dict`, tied ones under each of their names, on the CPU, in the
    # model's dtypes. They are the caller's own.
    tensors: dict[str, Tensor]
    ledger: Ledger  # the pushes contained in `version`
    versions: dict[int, VersionId] = field(default_factory=dict)  # of each trained fragment


class PulledModel:
    """See the head of this module."""

    def __init__(self, manifest: Manifest, terms: Terms, link: Link) -> None:
        self.manifest = manifest
        self.layout = terms.layout
        self.config = terms.config
        self.link = link
        self.versions: dict[int, VersionId] = {}  # by fragment, what is here
        self._states: dict[int, FlatState] = {}
        self._ledger = Ledger()  # of fragment 0

    def take(self, arrival: Arrival | None) -> None:
        """A version has come, or none."""
        if arrival is None:
            return
        released = arrival.released
        if arrival.values is not None:
            self._states[released.fragment] = arrival.values
            self.link.set_base(released.fragment, arrival.values)
        self.versions[released.fragment] = released.version
        if released.fragment == 0:
            self._ledger = released.ledger

    def part(self, fragment: int | None) -> FragmentLayout:
        """The fragment that is to be pushed; raises UsageError for one that there is not."""
        parts = self.layout.fragments
        if fragment is None and len(parts) == 1:
            return parts[0]
        if fragment is None or not 0 <= fragment < len(parts):
            raise UsageError(
                f"push() was given fragment {fragment}, and this run has {len(parts)}; give the number "
                f"of one of them, 0 to {len(parts) - 1}."
            )
        return parts[fragment]

    def parameters(self) -> GlobalParameters:
        """What is here, as tensors that are the caller's own."""
        here: dict[str, Tensor] = {}
        for state in self._states.values():
            here |= state.by_name()
        tensors: dict[str, Tensor] = {}
        for entry in self.manifest.entries:
            value = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            if entry.name in here:  # else of a fragment without elements
                value.copy_(here[entry.name])
            for name in (entry.name, *entry.aliases):
                tensors[name] = value
        trained = {part.fragment: self.versions[part.fragment] for part in self.layout.fragments}
        return GlobalParameters(self.versions[0], tensors, self._ledger, trained)

    def complete(self, part: FragmentLayout, delta: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The delta of each tensor of a fragment; raises UsageError for what does not fit."""
        whole: dict[str, Tensor] = {}
        trained = (place.entry for each in self.layout.fragments for place in each.places)
        known = {name for entry in trained for name in (entry.name, *entry.aliases)}
        for place in part.places:
            entry = place.entry
            names = (entry.name, *entry.aliases)
            given = next((delta[name] for name in names if name in delta), None)
            if given is None:
                if place.segment is Segment.PARAMETERS:
                    raise UsageError(f"The pseudo-gradient lacks {entry.name!r}.")
                given = self._states[part.fragment].of(place)
            if tuple(given.shape) != entry.shape:
                raise UsageError(
                    f"The pseudo-gradient of {entry.name} has shape {list(given.shape)}, the model "
                    f"has {list(entry.shape)}."
                )
            whole[entry.name] = given
        strange = [name for name in delta if name not in known]
        if strange:
            raise UsageError(f"The run does not train {strange[0]!r}; leave it out.")
        return whole
