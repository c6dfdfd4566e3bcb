"""What a checkpoint keeps of the state: all but the tensors, as it stands at one moment.

It is taken by the core itself, at the end of a round. By the time the loop carries out what the core
asked for, the next round may have begun in the record, though no tensor has moved yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco_protocol.manifest import Manifest
from diloco_protocol.version import Ledger, VersionId


@dataclass(frozen=True)
class FragmentRecord:
    """One fragment."""

    version: VersionId
    ledger: Ledger
    gradients: int  # how many the outer optimizer has had
    round: int  # the last one of it
    averaged: int
    # Of the versions before this one, by counter, as far as they are known.
    tags: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DataSetRecord:
    """One data set of the work queue."""

    size: int
    epochs: int
    next: int  # tickets below it were handed out
    uncounted: tuple[int, ...]  # those of them that are in no version: start, stop, start, stop
    seed: int | None = None  # of the order in each epoch; None: as they are numbered


@dataclass(frozen=True)
class RunRecord:
    """The run."""

    run: str
    number: int  # of the round that comes next
    epoch: str  # the life of the broker
    manifest: Manifest
    plan: tuple[int, ...]  # the fragment of each tensor of the manifest
    fragments: Mapping[int, FragmentRecord]
    workers: Mapping[str, Mapping[str, int]]  # counters of the workers that are here, by id
    totals: Mapping[str, int]  # counters of the run
    shards: tuple[str, ...] = ()  # ids of workers, by their share of the data
    data_sets: Mapping[str, DataSetRecord] = field(default_factory=dict)  # by name
    term: int = 0  # how often the run's hub was replaced
    standby: str = ""  # the name of the hub's standby; empty where it has had none
    left: tuple[str, ...] = ()  # ids of workers that left properly and were not replaced
    missing: tuple[str, ...] = ()  # ids of workers that were gone and still due
