"""The run's model, as the first worker described it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco_broker.core.versions.record import InitialModel, Resumption
from diloco_protocol.chunks import ModelLayout, lay_out_plan
from diloco_protocol.description import Description, describe
from diloco_protocol.manifest import Manifest, without_wrappers
from diloco_protocol.messages import RunConfig


@dataclass
class RunModel:
    """The model of the run, and facts about the run from files."""

    initial: InitialModel | None = None  # None without a model file
    manifest: Manifest | None = None  # the run's model, settled by the first worker that joins
    plan: tuple[int, ...] = ()  # the fragment of each of its tensors
    layout: ModelLayout | None = None
    description: Description | None = None  # the packed manifest
    # The digest of the sender; it differs from ours if the sender packs the manifest differently.
    came_as: bytes | None = None
    run: str | None = None  # name of the run; None until parameters are in transfer
    checkpoint: str = ""  # its path, for messages; empty without one
    # Counters of the workers that were members when the checkpoint was written, by id.
    known: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    resumed_number: int | None = None  # the next round according to the checkpoint
    moved_aside: frozenset[str] = frozenset()  # earlier runs, by name, that this one replaces

    def described_by(self, digest: bytes) -> Manifest | None:
        """The manifest, if this is its digest."""
        known = self.description
        return self.manifest if known and digest in (known.digest, self.came_as) else None

    def as_known(self, manifest: Manifest) -> Manifest:
        """The run's manifest, if this one differs from it only in names of wrapper modules."""
        known = self.manifest
        if known is None or known == manifest:
            return manifest
        return known if without_wrappers(known) == without_wrappers(manifest) else manifest

    def settle_manifest(
        self,
        manifest: Manifest,
        plan: tuple[int, ...],
        config: RunConfig,
        came_as: bytes | None = None,
    ) -> ModelLayout:
        """Set the run's model; `plan` is the fragment of each of its tensors."""
        self.manifest, self.plan, self.came_as = manifest, plan, came_as
        self.description = describe(manifest)
        self.layout = lay_out_plan(
            manifest, plan, num_fragments=config.num_fragments, chunk_elements=config.chunk_elements
        )
        return self.layout

    def forget_manifest(self) -> None:
        """Let the next worker that joins define the run's model."""
        self.manifest, self.plan, self.layout = None, (), None
        self.description = self.came_as = None

    def resume(self, resumption: Resumption) -> None:
        record = resumption.record
        self.manifest, self.plan, self.layout = record.manifest, record.plan, resumption.layout
        self.description = describe(record.manifest)
        self.run, self.checkpoint = record.run, resumption.source
        self.resumed_number, self.known = record.number, record.workers

    @property
    def all_fragments(self) -> tuple[int, ...]:
        """Fragments that have chunks, the frozen one included."""
        assert self.layout is not None
        return tuple(part.fragment for part in self.layout.all if part.chunks)
