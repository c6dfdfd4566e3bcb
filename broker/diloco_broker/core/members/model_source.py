"""How a broker without parameters gets some: from a model file, or from a worker that donates its own.

Either way the first version of each fragment is made chunk by chunk, and nobody sees any of it before
all fragments are whole. A donor that dies is replaced by the next one, which begins afresh. A donor that
holds a version of a run donates it under its name and with its ledger, so that a broker which lost its
memory, or comes back with an old checkpoint, continues that run where the workers are (`recovering`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_broker.core.members.members import Member
from diloco_broker.core.versions.fragment import WholeVersion
from diloco_broker.core.versions.record import FragmentRecord, RunRecord
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.chunks import ModelLayout, lay_out_plan
from diloco_protocol.description import Description, describe
from diloco_protocol.manifest import Kind, Manifest, without_wrappers
from diloco_protocol.messages import Push, Released, RunConfig
from diloco_protocol.version import Ledger, VersionId, tag_of

# A donor that delivers nothing for so long is passed over, where there is another one.
DONOR_PATIENCE_S = 30.0


@dataclass(frozen=True)
class InitialModel:
    """What the broker was started with."""

    shapes: Mapping[str, tuple[int, ...]]  # of each tensor, by name
    # Names of those that are not finite in fp32; only the frozen part may have some.
    infinite: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Resumption:
    """What a broker goes on from: all of a checkpoint but the tensors."""

    source: str  # where it came from, for people
    record: RunRecord
    layout: ModelLayout  # what follows from the record's manifest and plan
    wires: Mapping[int, tuple[Any, ...]]  # of each fragment, its chunks in wire form
    parents: Released | None = None  # at a relay: what its parent said of the version
    title: str = ""  # the run, for people: when it was saved and how far it was; empty at a relay


@dataclass
class Intake:
    """The first version of one fragment on its way in."""

    version: VersionId
    wires: list[Any]  # its chunks in wire form, None where one is missing
    arrived: Bitmap  # chunks received from the donor, in place or waiting to be
    push: Push | None = None  # the donor's push; None for the model file
    stored: int = 0  # how many chunks are in place
    digests: dict[int, bytes] = field(default_factory=dict)  # of frozen chunks that are in place

    @property
    def is_whole(self) -> bool:
        return all(wire is not None for wire in self.wires)

    def name_by_content(self) -> None:
        """Frozen parameters are named by what they are, so that who has the same need not fetch them."""
        if self.digests:
            tag = tag_of(self.digests[index] for index in range(len(self.wires)))
            self.version = replace(self.version, tag=tag)

    def whole(self, before: FragmentRecord | None = None, gradients: int = 0) -> WholeVersion:
        """What came in. `before`: what is known of the fragment's version that it replaces."""
        ledger = (self.push.ledger if self.push else None) or Ledger()
        round_, averaged = (before.round, before.averaged) if before else (0, 0)
        record = FragmentRecord(self.version, ledger, gradients, round_, averaged)
        return WholeVersion(record, tuple(self.wires))


@dataclass
class Donation:
    """The first parameters on their way in."""

    # Id of the worker that was asked; None where nobody was, or the model file is loaded.
    donor: str | None = None
    wanted: tuple[int, ...] = ()  # the fragments that it was asked for
    asked: bytes = b""  # session of the donor that was asked
    progress_at: float = 0.0  # when the donor last delivered something (run time)
    intakes: dict[int, Intake] = field(default_factory=dict)  # by fragment
    is_loading: bool = False  # the model file is being placed

    @property
    def is_complete(self) -> bool:
        """True when every fragment that was asked for is whole."""
        return all(f in self.intakes and self.intakes[f].is_whole for f in self.wanted)


@dataclass
class RunModel:
    """The model of the run: what it consists of, and where its first parameters come from."""

    initial: InitialModel | None = None  # what the model file has, None without one
    manifest: Manifest | None = None  # the run's model, settled by the first worker that joins
    plan: tuple[int, ...] = ()  # the fragment of each of its tensors
    layout: ModelLayout | None = None
    run: str | None = None  # name of the run; None until parameters are on their way
    donation: Donation = field(default_factory=Donation)
    # When the first worker came that holds a version (run time).
    offered_at: float | None = None
    # Workers whose parameters could not be used, until they join again.
    rejected_donors: set[str] = field(default_factory=set)
    # Workers that were asked and sent nothing for `patience_s`; asked again when nobody else is left,
    # with more patience.
    passed_over: set[str] = field(default_factory=set)
    patience_s: float = DONOR_PATIENCE_S
    # When a worker that holds a version died before it could give it (run time).
    holder_lost_at: float | None = None
    # Whom the first parameters wait for, as the end of a sentence; empty while for nobody.
    waits_for: str = ""
    # Fragments of a run that exists, from a checkpoint or a worker, until it goes on.
    restored: dict[int, WholeVersion] = field(default_factory=dict)
    # The fragments as the checkpoint has them.
    saved: Mapping[int, WholeVersion] = field(default_factory=dict)
    # Counters of the workers that were here when the checkpoint was written, by id.
    known: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    checkpoint: str = ""  # its name, for people; empty without one
    resumed_number: int | None = None  # the next round by the checkpoint
    is_done: bool = False  # every fragment has a version
    # Under which digest the manifest came; who packs it in another way has another one than we.
    came_as: bytes | None = None
    moved_aside: frozenset[str] = frozenset()  # earlier runs, by name, that this one replaces
    _described: tuple[Manifest, Description] | None = None  # a manifest, and what it is packed

    @property
    def description(self) -> Description | None:
        """The manifest as it travels; packed once, since anybody may ask for it."""
        if self.manifest is None:
            return None
        if self._described is None or self._described[0] is not self.manifest:
            self._described = self.manifest, describe(self.manifest)
        return self._described[1]

    def described_by(self, digest: bytes) -> Manifest | None:
        """The manifest, if that is the digest of its description."""
        description = self.description
        is_it = description is not None and digest in (description.digest, self.came_as)
        return self.manifest if is_it else None

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
        self.layout = lay_out_plan(
            manifest, plan, num_fragments=config.num_fragments, chunk_elements=config.chunk_elements
        )
        return self.layout

    def forget_claim(self) -> bool:
        """Everybody is gone. What the run's model would have been is open again if nothing of it is
        here; returns whether that is so."""
        is_here = self.is_done or self.donation.is_loading or self.restored or self.saved
        if not is_here:
            self.manifest, self.plan, self.layout, self.came_as = None, (), None, None
        return not is_here

    def resume(self, resumption: Resumption) -> None:
        record = resumption.record
        self.manifest, self.plan, self.layout = record.manifest, record.plan, resumption.layout
        self.run, self.checkpoint = record.run, resumption.source
        self.resumed_number, self.known = record.number, record.workers
        self.saved = {
            fragment: WholeVersion(each, resumption.wires[fragment])
            for fragment, each in record.fragments.items()
        }
        self.restored = dict(self.saved)

    def mismatches(self, manifest: Manifest) -> list[str]:
        """How a worker's model differs from the model file, one clause each."""
        if self.initial is None:
            return []
        shapes = self.initial.shapes
        known: set[str] = set()
        found = []
        for entry in manifest.entries:
            names = [name for name in (entry.name, *entry.aliases) if name in shapes]
            known.update(names)
            if not names:
                found.append(f"the file lacks {entry}")
            elif shapes[names[0]] != entry.shape:
                found.append(
                    f"{entry.name} is {list(entry.shape)} in the worker and "
                    f"{list(shapes[names[0]])} in the file"
                )
            elif names[0] in self.initial.infinite and entry.kind is not Kind.FROZEN:
                found.append(
                    f"{entry.name} has infinities in the file and is {entry.kind.value} in the worker"
                )
        return found + [f"the file has an extra {name}" for name in shapes if name not in known]

    def choose_donor(self, members: Iterable[Member]) -> Member | None:
        """The worker with the newest version of a run; among equals, the first that joined."""
        return max(self.candidates(members), key=_newness, default=None)

    def candidates(self, members: Iterable[Member]) -> list[Member]:
        left_out = self.rejected_donors | self.passed_over
        return [member for member in members if member.worker_id not in left_out]

    def forgive(self, worker_id: str) -> None:
        """A worker joins, or is gone: what was wrong with its parameters may not be now."""
        self.rejected_donors.discard(worker_id)
        self.passed_over.discard(worker_id)

    def ask_all_again(self) -> bool:
        """Those that were slow may be asked again, and get twice the time. False if there are none."""
        if not self.passed_over:
            return False
        self.passed_over.clear()
        self.patience_s *= 2
        return True

    @property
    def all_fragments(self) -> tuple[int, ...]:
        """Fragments that have chunks, the frozen one included."""
        assert self.layout is not None
        return tuple(part.fragment for part in self.layout.all if part.chunks)

    @property
    def is_restored(self) -> bool:
        """Every fragment of the run that exists is here."""
        return set(self.restored) >= set(self.all_fragments)

    def ask(self, donor: Member, wanted: tuple[int, ...], now: float) -> None:
        self.donation = Donation(donor.worker_id, wanted, progress_at=now)
        self.waits_for = ""

    def abandon(self) -> None:
        """Forget what came in from the donor at hand, and the donor."""
        self.donation = Donation()
        if not self.restored:
            self.run = None

    def revert(self, fragment: int) -> None:
        """What there was of a fragment has been overwritten: only the checkpoint has another copy."""
        self.restored.pop(fragment, None)
        if fragment in self.saved:
            self.restored[fragment] = self.saved[fragment]

    def sources(self, members: Iterable[Member]) -> dict[int, Member]:
        """By fragment, the worker that holds the newest version, where it is newer than ours."""
        best: dict[int, Member] = {}
        newest = {fragment: each.version.counter for fragment, each in self.restored.items()}
        there = set(self.all_fragments)
        for member in self.candidates(members):
            for fragment, held in enumerate(member.versions):
                if fragment not in there:
                    continue
                of_the_run = held is not None and held.run == self.run
                if held and of_the_run and held.counter > newest.get(fragment, -1):
                    best[fragment] = member
                    newest[fragment] = held.counter
        return best

    def adopt(self, size: int) -> dict[int, int]:
        """Keep what came in; `size` is that of the outer optimizer's buffer.

        Returns, by fragment, how many versions newer it is than what we had.
        """
        steps = {}
        for fragment, intake in self.donation.intakes.items():
            ours = self.restored[fragment].record if fragment in self.restored else None
            steps[fragment] = intake.version.counter - (ours.version.counter if ours else 0)
            if ours and self.checkpoint:
                gradients = ours.gradients + steps[fragment]
            else:
                # The buffer is empty, however often we adopt; the schedules go on.
                gradients = intake.version.counter - intake.version.counter % size
            self.restored[fragment] = intake.whole(ours, gradients)
        self.donation = Donation()
        return steps

    def finish(self) -> None:
        """Every fragment has a version: what was kept until then is forgotten."""
        self.is_done = True
        self.donation = Donation()
        self.restored.clear()
        self.saved = {}


def _newness(member: Member) -> int:
    return sum(v.counter + 1 for v in member.versions if v is not None)
