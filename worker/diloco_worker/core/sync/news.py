"""What the link tells the training thread: what has come, and how things stand with the broker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_protocol import RunConfig, VersionId
from diloco_protocol.messages import Released
from diloco_worker.core.connection import Phase
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

    turns: tuple[Turning, ...] = ()
    arrivals: Mapping[int, Arrival] = field(default_factory=dict)
    rejections: Mapping[int, Rejection] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.turns or self.arrivals or self.rejections)


@dataclass(frozen=True)
class LinkState:
    """How things stand with the broker, at one moment.

    Two are equal if waiting goes on with both alike.

    Attributes:
        config: of the run.
        sync_every: H that the broker has worked out for this worker (Dynamic Local Updates).
        phase: of the session.
        reconnections: welcomes after the first.
        uploaded: pushes in flight whose chunks are all in at the broker.
        put_off: pushes in flight that the broker takes nothing of yet.
        has_ended: nothing comes or goes any more.
        is_over: the run has ended, or has for this worker.
        is_restarting: the broker has gone away to come back.
        asked_to_stop: why the process is about to end, so that nothing is waited for.
        refusal: why the broker refuses this worker.
        silence: seconds since the broker last said anything; None when it never has.
        address: of the broker.
        last_error: the last thing that went wrong.
        description: what the link is at, as the end of a sentence.
    """

    config: RunConfig = field(compare=False)
    sync_every: int | None = field(default=None, compare=False)
    phase: Phase = Phase.JOINED
    reconnections: int = 0
    uploaded: frozenset[int] = frozenset()
    put_off: frozenset[int] = frozenset()
    has_ended: bool = False
    is_over: bool = False
    is_restarting: bool = False
    asked_to_stop: str | None = None
    refusal: str | None = field(default=None, compare=False)
    silence: float | None = field(default=None, compare=False)
    address: str = field(default="", compare=False)
    last_error: str | None = field(default=None, compare=False)
    description: str = field(default="", compare=False)
