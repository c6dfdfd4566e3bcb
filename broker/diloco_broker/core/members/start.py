"""The state of a broker from its start until it has parameters; `seeding` changes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from diloco_broker.core.versions.fragment import WholeVersion
from diloco_broker.core.versions.record import FragmentRecord
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.version import Ledger, VersionId, tag_of

# Seconds without progress after which another worker, if any, replaces the seed worker; doubled each
# time that it is too slow.
SEED_PATIENCE_S = 30.0


class Start(Enum):
    """How the broker gets its parameters. Only `seeding` changes it."""

    WAITING_FOR_WORKERS = "workers"  # no member can upload parameters
    WAITING_FOR_HOLDERS = "holders"  # workers that may hold newer versions have time to rejoin
    ADOPTING = "adopting"  # a worker uploads versions of an existing run
    SEEDING = "seeding"  # a worker uploads the parameters of a new run
    LOADING_FILE = "file"  # a new run starts from the model file
    RUNNING = "running"  # every fragment has a version


@dataclass
class FirstVersion:
    """The first version of one fragment, while its chunks arrive."""

    version: VersionId
    wires: list[Any]  # its chunks in wire form, None for missing ones
    arrived: Bitmap  # chunks received, whether stored yet or not
    push_id: int = 0  # of the seed worker's push
    ledger: Ledger = field(default_factory=Ledger)
    stored: int = 0  # number of stored chunks
    digests: dict[int, bytes] = field(default_factory=dict)  # of frozen chunks that are stored

    @property
    def is_complete(self) -> bool:
        return self.stored == len(self.wires)

    def whole(self, before: FragmentRecord | None = None, gradients: int = 0) -> WholeVersion:
        """Make the complete version. `before` is the record of the version that it replaces.

        Frozen parameters have a tag of their content: a worker that has the same need not download them.
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
    """An upload by a seed worker, or the load of the model file; without `wanted` there is neither."""

    worker_id: str = ""  # empty for the model file
    # By fragment, the version that the worker claims to hold; None for the parameters of a new run.
    wanted: Mapping[int, VersionId | None] = field(default_factory=dict)
    patience_s: float = SEED_PATIENCE_S
    progress_at: float = 0.0  # when the worker was asked, or its last chunk stored (run time)
    versions: dict[int, FirstVersion] = field(default_factory=dict)  # by fragment

    @property
    def is_complete(self) -> bool:
        return all(f in self.versions and self.versions[f].is_complete for f in self.wanted)


@dataclass
class Recovery:
    """The recovery of an existing run, until it continues. Times are run time."""

    # Complete versions by fragment: all recovered ones, and those of the checkpoint.
    restored: dict[int, WholeVersion] = field(default_factory=dict)
    saved: Mapping[int, WholeVersion] = field(default_factory=dict)
    # In WAITING_FOR_HOLDERS: the workers it waits for, as the end of a sentence, and the deadline.
    waits_for: str = ""
    waits_until: float = 0.0
    waits_since: float | None = None  # when such a wait for a run without a checkpoint started
    holder_lost_at: float | None = None  # when a worker died that held a version
