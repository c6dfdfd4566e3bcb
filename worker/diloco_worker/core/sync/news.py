"""What the link tells the training thread: versions, rejections, and what moves the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from diloco_protocol import VersionId
from diloco_protocol.messages import Released
from diloco_worker.core.effects import Carried, Granted, Joined

# What moves the cursor in the sequence of rounds; `Released` stands for a version that is here, whole.
Turning = Joined | Granted | Carried | Released


@dataclass(frozen=True)
class Arrival:
    """A whole version.

    Attributes:
        released: its name, ledger and round.
        counted: push ids of this worker in flight until now that it contains whole.
        values: as the shell keeps them, which only the shell looks at; None where no copy is kept.
        staleness: versions between the counted push's base and the one it went into, if the broker
            has told.
        superseding: why these values take the place of the steps in the model, and of the push in
            flight; None where they do not.
    """

    released: Released
    counted: frozenset[int]
    values: Any
    staleness: int | None = None
    superseding: str | None = None

    @property
    def version(self) -> VersionId:
        return self.released.version

    def after(self, earlier: Arrival | None) -> Arrival:
        """This version where `earlier` has not been looked at yet: it contains what that did."""
        if earlier is None:
            return self
        values = self.values
        if values is None and earlier.version == self.version:
            values = earlier.values
        staleness = self.staleness if self.counted else earlier.staleness
        return replace(
            self,
            counted=self.counted | earlier.counted,
            values=values,
            staleness=staleness,
            superseding=self.superseding or earlier.superseding,
        )


@dataclass(frozen=True)
class Rejection:
    """Why a push was dropped."""

    code: str
    text: str


@dataclass(frozen=True)
class News:
    """All that has come since the last look.

    Attributes:
        turns: what concerns rounds and whose turn it is, in the order in which it came: a welcome may
            be from a broker that has gone back behind the versions here before it.
        arrivals: whole versions, by fragment.
        rejections: pushes that were dropped, by push id.
    """

    turns: tuple[Turning, ...]
    arrivals: Mapping[int, Arrival]
    rejections: Mapping[int, Rejection]
