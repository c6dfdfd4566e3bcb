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
class Recovery:
    """What is known of a run that exists, until it goes on. Times are run time."""

    # Complete versions by fragment, from a checkpoint or a worker; those of the checkpoint.
    restored: dict[int, WholeVersion] = field(default_factory=dict)
    saved: Mapping[int, WholeVersion] = field(default_factory=dict)
    # In WAITING_FOR_HOLDERS: for whom, as the end of a sentence, and until when.
    waits_for: str = ""
    waits_until: float = 0.0
    waits_since: float | None = None  # when it first waited so for a run without a checkpoint
    holder_lost_at: float | None = None  # when a worker died that held a version
