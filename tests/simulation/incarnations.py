"""What one incarnation of a broker owes to those before it, checked at its start and in its messages.

- It begins with versions that existed, under their names, with their contents and their ledgers, and
  with an outer optimizer that knows how many gradients these have had.
- It adopts the newest versions of its workers, after it has waited for the workers that it knows.
- A push that a present worker was told to be counted is not lost. In a durable run no version is lost
  that any worker was told of: it is on the disk before the first message about it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.core.machine import Core
from diloco_broker.core.members.members import Member
from diloco_broker.core.versions.fragment import FragmentVersions
from diloco_broker.core.versions.record import FragmentRecord
from diloco_broker.storage.checkpoint_format import Checkpoint
from diloco_protocol.messages import Grant, Message, Released, Standing
from diloco_protocol.version import Ledger, VersionId
from simulation.contents import Contents, Key
from simulation.disk import Disk
from simulation.tensors import Record, Tensors, Wire, as_held, demand


@dataclass(frozen=True)
class Published:
    wires: tuple[Wire, ...]
    ledger: Ledger


class Incarnations:
    """`records` are all pushes that were ever offered."""

    def __init__(self, config: BrokerConfig, records: dict[Key, Record], disk: Disk | None) -> None:
        self.config = config
        self.tensors = Tensors(config, records)  # of the current incarnation
        self.number = 0  # of the current incarnation, from 1
        self.keys: dict[int, Key] = {}  # of all pushes, by push id
        self._records = records
        # By process, the last incarnation that had a run when it welcomed it.
        self._heard: dict[str, int] = {}
        self._disk = disk
        self._checkpoint: Checkpoint | None = None
        self._owner_of: Callable[[bytes], str] = str
        self.first: dict[int, VersionId] = {}  # what this incarnation began with, by fragment
        self._told: dict[int, list[Contents]] = {}  # the newest that any worker was told of

    def begins(
        self, tensors: Tensors, checkpoint: Checkpoint | None, owner_of: Callable[[bytes], str]
    ) -> None:
        """A broker starts. What it goes on with is settled later, fragment by fragment."""
        self.number += 1
        self.tensors, self._checkpoint, self._owner_of = tensors, checkpoint, owner_of
        self.first.clear()
        for record in self._records.values():
            record.taken.clear()
            record.whole_at = record.counted_in = None

    def heard_of(self, process: str) -> None:
        """A worker is welcome in a run that goes on: it knows the versions that count."""
        self._heard[process] = self.number

    # The beginning.

    def fragment_begins(
        self,
        core: Core,
        versions: FragmentVersions,
        published: Mapping[tuple[int, VersionId], Published],
        processes: frozenset[str],
    ) -> None:
        """The first version of a fragment in this incarnation, among all versions that were `published`.

        `processes` are the names of those that are alive.
        """
        fragment, version = versions.layout.fragment, versions.version
        assert version is not None
        ours_now = [wire.contents for wire in self.tensors.wires(fragment)]
        same = ours_now == [wire.contents for wire in versions.wires]
        demand(same, "fragment {} has other parameters than its version {}", fragment, version)
        known = published.get((fragment, version))
        ours = self._checkpoint.record.fragments[fragment] if self._checkpoint is not None else None
        # A durable run may have died with a version on the disk that no worker was told of.
        is_saved = ours is not None and ours.version == version
        was = known is not None or is_saved or version.counter == 0
        demand(was, "version {} never was", version)
        if known is not None:
            demand(
                as_held(known.wires) == as_held(versions.wires),
                "{} has other chunks than it had",
                version,
            )
            demand(known.ledger == versions.ledger, "{} has another ledger than it had", version)
        here = [m for m in core.state.members if fragment < len(m.versions)]
        self._check_choice(core, fragment, version, ours, here)
        self.first[fragment] = version
        self._check_losses(core, versions, here, processes)

    def _check_choice(
        self,
        core: Core,
        fragment: int,
        version: VersionId,
        ours: FragmentRecord | None,
        here: Iterable[Member],
    ) -> None:
        config, state = self.config, core.state
        if ours is not None:
            follows = version.run == ours.version.run and version.counter >= ours.version.counter
            demand(follows, "the checkpoint has {} and it goes on from {}", ours.version, version)
            stays = config.durable or config.recover == "rewind"
            right = version == ours.version or not stays
            demand(right, "the checkpoint has {}, and {} is adopted", ours.version, version)
            if stays:
                return
        best = max(
            (
                held.counter
                for held in (member.versions[fragment] for member in here)
                if held is not None and held.run == version.run
            ),
            default=0,
        )
        right = version.counter >= best
        demand(right, "a member has version {}, and it goes on from {}", best, version)
        away = set(self._checkpoint.record.workers if self._checkpoint else ()) - {
            m.worker_id for m in state.members
        }
        waited = state.now >= state.started_at + config.recover_wait  # as the broker adds it up
        waits = bool(away) if self._checkpoint else len(state.members) < config.workers
        is_run = self._checkpoint is not None or version.counter > 0
        demand(waited or not (is_run and waits), "it did not wait for {}", sorted(away))

    def _check_losses(
        self,
        core: Core,
        versions: FragmentVersions,
        here: Iterable[Member],
        processes: frozenset[str],
    ) -> None:
        """What was counted before and is not in the version that this incarnation begins with."""
        fragment = versions.layout.fragment
        chunks = [wire.contents for wire in versions.wires]
        if self.config.durable:
            for before, now in zip(self._told.get(fragment, ()), chunks, strict=False):
                kept = before.leads_to(now) or not before.depth
                demand(kept, "a version that was told of is not in {}", versions.version)
        owners = {self._owner_of(member.control): member for member in here}
        for record in self._records.values():
            if record.ending != "counted" or record.is_lost or record.push.fragment != fragment:
                continue
            key = self.keys[record.push.push_id]
            if record.is_whole_in(key, versions.wires):
                continue
            record.is_lost = True
            demand(not self.config.durable, "it was counted, and is lost: {}", record)
            member = owners.get(record.process)
            adopts = self._checkpoint is None or self.config.recover == "adopt"
            if not adopts or member is None or record.process not in processes:
                continue
            held, chosen = member.versions[fragment], versions.version
            assert chosen is not None
            if held is None or held.run != chosen.run:
                continue
            # Another branch of the run may be as long. A worker that has met a broker that
            # went on without this branch must not bring it back.
            donors = [o for o, m in owners.items() if m.versions[fragment] == chosen]
            knew = [o for o in donors if self._heard.get(o, 0) >= record.told_in_incarnation]
            demand(not knew, "{} brought {} back, {} had gone on: {}", knew, chosen, held, record)

    def counts_late(self, record: Record, began_with: Published) -> None:
        """A worker that was stopped reads only now that a former broker counted its push.

        If the current incarnation did not begin with that version, the push is lost with it.
        """
        if not record.is_whole_in(self.keys[record.push.push_id], began_with.wires):
            demand(not self.config.durable, "it was counted, and is lost: {}", record)
            record.is_lost = True

    # What is said.

    def says(self, core: Core, message: Message) -> None:
        match message:
            case Released(fragment=fragment, version=version):
                versions = core.state.versions[fragment]
                before = self.tensors.versions.get(fragment)  # this event may have released another
                right = version in (versions.version, before)
                demand(right, "{} is told of while {} is current", version, versions.version)
                if self.config.durable:
                    self._is_on_disk(versions)
            case Grant(push_id=push_id, fragment=fragment, standing=Standing.COUNTED):
                versions, key = core.state.versions[fragment], self.keys[push_id]
                inside = self._records[key].is_whole_in(key, versions.wires)
                demand(inside, "{} is said to be counted in {}", key, versions.version)
                if self.config.durable:
                    self._is_on_disk(versions)

    def _is_on_disk(self, versions: FragmentVersions) -> None:
        """A durable run announces no version that a crash could still take away."""
        fragment = versions.layout.fragment
        newest = self._disk.newest if self._disk is not None else None
        chunks = [wire.contents for wire in versions.wires]
        if fragment in self.first and versions.version != self.first[fragment]:
            saved: Sequence[Any] = newest.tensors[fragment].chunks if newest is not None else ()
            there = bool(saved) and all(map(Contents.leads_to, chunks, saved))
            demand(there, "{} is told of and is not on the disk", versions.version)
        self._told[fragment] = chunks
