"""What a checkpoint keeps of the state: all but the tensors, as it stands at one moment.

It is taken by the core itself, at the end of a round. By the time the loop carries out what the core
asked for, the next round may have begun in the record, though no tensor has moved yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from diloco_protocol.manifest import Manifest
from diloco_protocol.version import Ledger, VersionId

if TYPE_CHECKING:
    from diloco_broker.core.state.run import RunState


@dataclass(frozen=True)
class FragmentRecord:
    """One fragment.

    Attributes:
        gradients: how many the outer optimizer has had.
        round, averaged: the last round of it.
        tags: of the versions before this one, by counter, as far as they are known.
    """

    version: VersionId
    ledger: Ledger
    gradients: int
    round: int
    averaged: int
    tags: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """The run.

    Attributes:
        number: of the round that comes next.
        epoch: the life of the broker.
        plan: the fragment of each tensor of the manifest.
        workers: counters of the workers that are here, by id.
        totals: counters of the run.
    """

    run: str
    number: int
    epoch: str
    manifest: Manifest
    plan: tuple[int, ...]
    fragments: Mapping[int, FragmentRecord]
    workers: Mapping[str, Mapping[str, int]]
    totals: Mapping[str, int]


def run_record(state: RunState, number: int) -> RunRecord:
    """How things stand between rounds, or when a version is whole that is not released yet."""
    boot, unreleased = state.bootstrap, state.unreleased
    assert boot.manifest is not None and boot.run is not None
    fragments = {}
    for versions in state.versions.fragments:
        version, ledger, round_, averaged = (
            versions.version,
            versions.ledger,
            versions.round,
            versions.averaged,
        )
        if unreleased is not None and unreleased.ended.fragment == versions.layout.fragment:
            assert versions.in_progress is not None
            version, ledger = versions.in_progress.version, unreleased.ledger
            round_, averaged = unreleased.ended.number, unreleased.ended.averaged
        if version is not None:
            fragments[versions.layout.fragment] = FragmentRecord(
                version, ledger, versions.gradients, round_, averaged, versions.newest_tags()
            )
    return RunRecord(
        boot.run,
        number,
        state.epoch,
        boot.manifest,
        boot.plan,
        fragments,
        {member.worker_id: member.counters() for member in state.members},
        asdict(state.totals),
    )
