"""How a broker without parameters gets some: from a model file, or from a worker that donates its own.

Either way the first version of each fragment is made chunk by chunk, and nobody sees any of it before
all fragments are whole. A donor that dies is replaced by
the next one, which begins afresh. A donor that holds a version of a run donates it under its name and
with its ledger, so that a broker which lost everything continues that run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_broker.membership import Member
from diloco_protocol.chunks import Bitmap, ModelLayout, lay_out
from diloco_protocol.manifest import Manifest
from diloco_protocol.messages import Push, RunConfig
from diloco_protocol.version import VersionId


@dataclass(frozen=True)
class InitialModel:
    """Names and shapes of the parameters that the broker was started with."""

    shapes: Mapping[str, tuple[int, ...]]


@dataclass
class Intake:
    """The first version of one fragment on its way in.

    Attributes:
        wires: its chunks in wire form, None where one is missing.
        arrived: chunks received from the donor, in place or waiting to be.
        push: the donor's push; None for the model file.
    """

    version: VersionId
    wires: list[Any]
    arrived: Bitmap
    push: Push | None = None

    @property
    def is_whole(self) -> bool:
        return all(wire is not None for wire in self.wires)


@dataclass
class Bootstrap:
    """The model of the run: what it consists of, and where its first parameters come from.

    Attributes:
        initial: what the model file has, None without one.
        manifest: the run's model, settled by the first worker that joins.
        plan: the fragment of each of its tensors.
        run: name of the run; None until parameters are on their way.
        donor: id of the worker that was asked.
        rejected_donors: workers whose parameters could not be used.
        is_loading: the model file is being placed.
        is_done: every fragment has a version.
    """

    initial: InitialModel | None = None
    manifest: Manifest | None = None
    plan: tuple[int, ...] = ()
    layout: ModelLayout | None = None
    run: str | None = None
    donor: str | None = None
    offered_at: float | None = None  # when the first worker came that holds a version
    asked: bytes = b""  # session of the donor that was asked
    progress_at: float = 0.0  # when the donor last delivered something
    intakes: dict[int, Intake] = field(default_factory=dict)  # by fragment
    rejected_donors: set[str] = field(default_factory=set)
    is_loading: bool = False
    is_done: bool = False

    def settle_manifest(
        self, manifest: Manifest, plan: tuple[int, ...], config: RunConfig
    ) -> ModelLayout:
        """This is the run's model from now on; `plan` is the fragment of each of its tensors."""
        self.manifest, self.plan = manifest, plan
        self.layout = lay_out(
            manifest,
            {entry.name: part for entry, part in zip(manifest.entries, plan, strict=True)},
            num_fragments=config.num_fragments,
            chunk_elements=config.chunk_elements,
        )
        return self.layout

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
        return found + [f"the file has an extra {name}" for name in shapes if name not in known]

    def choose_donor(self, members: Iterable[Member]) -> Member | None:
        """The worker with the newest version of a run; among equals, the first that joined."""
        candidates = [m for m in members if m.worker_id not in self.rejected_donors]
        return max(candidates, key=_newness, default=None)

    def needed(self) -> list[int]:
        """Fragments that must come in: those that have chunks."""
        assert self.layout is not None
        return [part.fragment for part in self.layout.all if part.chunks]

    @property
    def is_complete(self) -> bool:
        """True when every fragment is whole."""
        return all(f in self.intakes and self.intakes[f].is_whole for f in self.needed())

    def abandon(self) -> None:
        """Forget what came in, and who it came from."""
        self.run = self.donor = None
        self.asked = b""
        self.intakes.clear()

    def finish(self) -> None:
        self.is_done = True
        self.is_loading = False
        self.donor = None
        self.intakes.clear()


def _newness(member: Member) -> int:
    return sum(v.counter + 1 for v in member.versions if v is not None)
