"""What the I/O thread and the training thread tell each other, as frozen records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from diloco_protocol import VersionId
from diloco_protocol.messages import Heartbeat, Released
from diloco_worker.core.effects import Carried, Granted, Joined
from diloco_worker.model.flat_state import FlatState

# What moves the cursor in the sequence of rounds; `Released` stands for a version that is here, whole.
Turning = Joined | Granted | Carried | Released


# Of a warning in a heartbeat; whole, it is in the worker's log.
MAX_WARNING_LENGTH = 300


@dataclass(frozen=True)
class Progress:
    """How training stands, for heartbeats. `tokens` and `step` are totals."""

    step: int = 0
    inner_step: int = 0
    waiting: bool = False
    steps_per_s: float | None = None
    loss: float | None = None
    tokens: int = 0
    merge_delay: int | None = None
    warning: str | None = None

    def heartbeat(self, session: bytes, *, uploading: bool) -> Heartbeat:
        return Heartbeat(
            session=session,
            step=self.step,
            inner_step=self.inner_step,
            state="pushing" if uploading else "waiting" if self.waiting else "training",
            steps_per_s=self.steps_per_s,
            loss=self.loss,
            tokens=self.tokens,
            merge_delay=self.merge_delay,
            warning=None if self.warning is None else self.warning[:MAX_WARNING_LENGTH],
        )


@dataclass(frozen=True)
class Arrival:
    """A whole version.

    Attributes:
        released: its name, ledger and round.
        counted: push ids of this worker in flight until now that it contains whole.
        state: its values; None where no copy of them is kept.
        staleness: versions between the counted push's base and the one it went into, if the broker
            has told.
        superseding: why these values take the place of the steps in the model, and of the push in
            flight; None where they do not.
    """

    released: Released
    counted: frozenset[int]
    state: FlatState | None
    staleness: int | None = None
    superseding: str | None = None

    @property
    def version(self) -> VersionId:
        return self.released.version

    def after(self, earlier: Arrival | None) -> Arrival:
        """This version where `earlier` has not been looked at yet: it contains what that did."""
        if earlier is None:
            return self
        state = self.state
        if state is None and earlier.version == self.version:
            state = earlier.state
        staleness = self.staleness if self.counted else earlier.staleness
        return replace(
            self,
            counted=self.counted | earlier.counted,
            state=state,
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
