"""The run's model, and the state in which a broker without parameters is: see `seeding`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from diloco_broker.core.members.members import Member
from diloco_broker.core.versions.fragment import WholeVersion
from diloco_broker.core.versions.record import FragmentRecord, InitialModel, Resumption
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.chunks import ModelLayout, lay_out_plan
from diloco_protocol.description import Description, describe
from diloco_protocol.manifest import Manifest, without_wrappers
from diloco_protocol.messages import RunConfig
from diloco_protocol.version import Ledger, VersionId, tag_of

# Seconds without progress after which another worker replaces the seed worker, if there is one; twice as
# many for each time that it was too slow before.
SEED_PATIENCE_S = 30.0


class Start(Enum):
    """How the broker gets its parameters. Only `seeding` changes it."""

    WAITING_FOR_WORKERS = "workers"  # no worker here can upload any
    WAITING_FOR_HOLDERS = "holders"  # workers that may hold newer versions have time to come back
    ADOPTING = "adopting"  # a worker uploads versions of a run that exists
    SEEDING = "seeding"  # a worker uploads the parameters of a new run
    LOADING_FILE = "file"  # a new run begins with the model file
    RUNNING = "running"  # every fragment has a version


@dataclass
class FirstVersion:
    """The first version of one fragment, while its chunks arrive."""

    version: VersionId
    wires: list[Any]  # its chunks in wire form, None where one is missing
    arrived: Bitmap  # chunks received, stored or waiting to be
    push_id: int = 0  # of the seed worker's push
    ledger: Ledger = field(default_factory=Ledger)
    stored: int = 0  # how many chunks are
    digests: dict[int, bytes] = field(default_factory=dict)  # of frozen chunks that are stored

    @property
    def is_complete(self) -> bool:
        return self.stored == len(self.wires)

    def whole(self, before: FragmentRecord | None = None, gradients: int = 0) -> WholeVersion:
        """The complete version. `before`: the record of the version that it replaces.

        Frozen parameters are named by their content: a worker that has them need not fetch them.
        """
        version = self.version
        if self.digests:
            tag = tag_of(self.digests[index] for index in range(len(self.wires)))
            version = replace(version, tag=tag)
        round_, averaged = (before.round, before.averaged) if before else (0, 0)
        record = FragmentRecord(version, self.ledger, gradients, round_, averaged)
        return WholeVersion(record, tuple(self.wires))


@dataclass
class Seeding:
    """What a seed worker uploads, or the model file has; without `wanted`, nothing is in transfer."""

    worker_id: str = ""  # empty for the model file
    # By fragment, the version that the worker said it holds; None for the parameters of a new run.
    wanted: Mapping[int, VersionId | None] = field(default_factory=dict)
    patience_s: float = SEED_PATIENCE_S
    progress_at: float = 0.0  # when the worker was asked, or its last chunk stored (run time)
    versions: dict[int, FirstVersion] = field(default_factory=dict)  # by fragment

    @property
    def is_complete(self) -> bool:
        return all(f in self.versions and self.versions[f].is_complete for f in self.wanted)


@dataclass
class RunModel:
    """The model of the run: what it consists of, and where its first parameters come from."""

    initial: InitialModel | None = None  # None without a model file
    manifest: Manifest | None = None  # the run's model, settled by the first worker that joins
    plan: tuple[int, ...] = ()  # the fragment of each of its tensors
    layout: ModelLayout | None = None
    description: Description | None = None  # the manifest as it travels
    # The digest that the manifest came with; it differs from ours if the sender packs it differently.
    came_as: bytes | None = None
    run: str | None = None  # name of the run; None until parameters are in transfer
    start: Start = Start.WAITING_FOR_WORKERS
    seeding: Seeding = field(default_factory=Seeding)
    # In WAITING_FOR_HOLDERS: for whom, as the end of a sentence, and until when (run time).
    waits_for: str = ""
    waits_until: float = 0.0
    waits_since: float | None = None  # when it first waited so for a run without a checkpoint
    holder_lost_at: float | None = None  # when a worker died that held a version (run time)
    # Complete versions of a run that exists, from a checkpoint or a worker, until the run goes on.
    restored: dict[int, WholeVersion] = field(default_factory=dict)
    saved: Mapping[int, WholeVersion] = field(default_factory=dict)  # the checkpoint's, until then
    checkpoint: str = ""  # its name, for people; empty without one
    # Counters of the workers that were here when the checkpoint was written, by id.
    known: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    resumed_number: int | None = None  # the next round by the checkpoint
    moved_aside: frozenset[str] = frozenset()  # earlier runs, by name, that this one replaces

    @property
    def is_running(self) -> bool:
        return self.start is Start.RUNNING

    @property
    def manifest_is_settled(self) -> bool:
        """Parameters are here, so no worker may bring another model."""
        return self.start in (Start.LOADING_FILE, Start.RUNNING) or bool(self.restored)

    @property
    def run_is_settled(self) -> bool:
        """A run exists and no other one takes its place."""
        return self.start in (Start.ADOPTING, Start.RUNNING) or bool(self.restored)

    def described_by(self, digest: bytes) -> Manifest | None:
        """The manifest, if that is the digest of its description."""
        known = self.description
        return self.manifest if known and digest in (known.digest, self.came_as) else None

    def as_known(self, manifest: Manifest) -> Manifest:
        """The run's manifest where this one differs from it by the names of wrappers alone."""
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
        """This is the run's model from now on; `plan` is the fragment of each of its tensors."""
        self.manifest, self.plan, self.came_as = manifest, plan, came_as
        self.description = describe(manifest)
        self.layout = lay_out_plan(
            manifest, plan, num_fragments=config.num_fragments, chunk_elements=config.chunk_elements
        )
        return self.layout

    def forget_manifest(self) -> None:
        """The next worker that joins brings the run's model."""
        self.manifest, self.plan, self.layout = None, (), None
        self.description = self.came_as = None

    def resume(self, resumption: Resumption) -> None:
        record = resumption.record
        self.manifest, self.plan, self.layout = record.manifest, record.plan, resumption.layout
        self.description = describe(record.manifest)
        self.run, self.checkpoint = record.run, resumption.source
        self.resumed_number, self.known = record.number, record.workers
        self.saved = {
            fragment: WholeVersion(each, resumption.wires[fragment])
            for fragment, each in record.fragments.items()
        }
        self.restored = dict(self.saved)

    @property
    def all_fragments(self) -> tuple[int, ...]:
        """Fragments that have chunks, the frozen one included."""
        assert self.layout is not None
        return tuple(part.fragment for part in self.layout.all if part.chunks)

    @property
    def is_restored(self) -> bool:
        """Every fragment of the run that exists is here."""
        return set(self.restored) >= set(self.all_fragments)

    def sources(self, members: Sequence[Member]) -> dict[int, tuple[Member, VersionId]]:
        """By fragment, the newest version that is newer than ours, and the first worker that holds it.

        Of the run; if none is known, of that of the worker that has made the most rounds.
        """
        run, fragments = self.run or _newest_run(members), self.all_fragments
        newest = {fragment: each.version.counter for fragment, each in self.restored.items()}
        found: dict[int, tuple[Member, VersionId]] = {}
        for member in members:
            for fragment, held in enumerate(member.versions):
                if held is None or held.run != run or fragment not in fragments:
                    continue
                if held.counter > newest.get(fragment, -1):
                    found[fragment], newest[fragment] = (member, held), held.counter
        return found


def _newest_run(members: Sequence[Member]) -> str | None:
    held = [[version for version in member.versions if version] for member in members]
    newest = max(held, key=lambda versions: sum(v.counter + 1 for v in versions), default=[])
    return newest[0].run if newest else None
