"""Records of checkpoints and model files: everything but the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_protocol.chunks import ModelLayout
from diloco_protocol.manifest import Kind, Manifest
from diloco_protocol.version import Ledger, VersionId


@dataclass(frozen=True)
class FragmentRecord:
    """The current version of a fragment."""

    version: VersionId
    ledger: Ledger
    gradients: int  # number of gradients that the outer optimizer has received
    round: int  # the round that made it
    averaged: int
    # Tags of versions before this one, by counter, as far as they are known.
    tags: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DataSetRecord:
    """A data set of the work queue."""

    size: int
    epochs: int
    next: int  # tickets below it were handed out
    uncounted: tuple[int, ...]  # ranges of them that no version contains: start, stop, start, stop
    seed: int | None = None  # of the order in each epoch; None: in the order of their numbers


@dataclass(frozen=True)
class RunRecord:
    """A run between two rounds."""

    run: str
    number: int  # of the next round
    epoch: str  # the incarnation of the broker
    manifest: Manifest
    plan: tuple[int, ...]  # the fragment of each tensor of the manifest
    fragments: Mapping[int, FragmentRecord]
    workers: Mapping[str, Mapping[str, int]]  # counters of the members, by worker id
    totals: Mapping[str, int]  # counters of the run
    shards: tuple[str, ...] = ()  # ids of workers, by their share of the data
    data_sets: Mapping[str, DataSetRecord] = field(default_factory=dict)  # by name
    term: int = 0  # how often the run's hub was replaced
    standby: str = ""  # name of the hub's standby; empty if it never had one
    left: tuple[str, ...] = ()  # ids of workers that left properly and were not replaced
    missing: tuple[str, ...] = ()  # ids of workers that were absent and still due


@dataclass(frozen=True)
class InitialModel:
    """The model file that the broker was started with."""

    shapes: Mapping[str, tuple[int, ...]]  # of each tensor, by name
    # Names of tensors with values that are not finite in fp32; only frozen ones may have some.
    infinite: frozenset[str] = frozenset()

    def mismatches(self, manifest: Manifest) -> list[str]:
        """How a worker's model differs from the file, one clause each."""
        known: set[str] = set()
        found = []
        for entry in manifest.entries:
            names = [name for name in (entry.name, *entry.aliases) if name in self.shapes]
            known.update(names)
            if not names:
                found.append(f"the file lacks {entry}")
            elif self.shapes[names[0]] != entry.shape:
                found.append(
                    f"{entry.name} is {list(entry.shape)} in the worker and "
                    f"{list(self.shapes[names[0]])} in the file"
                )
            elif names[0] in self.infinite and entry.kind is not Kind.FROZEN:
                found.append(
                    f"{entry.name} has infinities in the file and is {entry.kind.value} in the worker"
                )
        return found + [
            f"the file has an extra {name}" for name in self.shapes if name not in known
        ]


@dataclass(frozen=True)
class Resumption:
    """A checkpoint that a broker resumes from, without the tensors."""

    source: str  # path of the checkpoint, for messages
    record: RunRecord
    layout: ModelLayout  # derived from the record's manifest and plan
    wires: Mapping[int, tuple[Any, ...]]  # by fragment, its chunks in wire form
    title: str  # describes the run in messages: when it was saved, and its progress
