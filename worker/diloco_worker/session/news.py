"""What the training thread receives: arrivals, the state of the link, the work of the script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_protocol import Bitmap, RunConfig, VersionId
from diloco_protocol.messages import Grant, Notice, Released, Welcome
from diloco_worker.session.connection import Phase

# Messages that move the cursor in the sequence of rounds: `Notice` of a deferred push, `Released` of a
# complete version.
Turning = Welcome | Grant | Notice | Released


@dataclass(frozen=True)
class Arrival:
    """A complete version."""

    released: Released  # its name, ledger and round
    counted: frozenset[int]  # pushes of this worker in flight until now that it contains completely
    values: Any  # of the shell; None: no copy is kept
    staleness: int | None = None  # versions from the counted push's base to here, if known
    # Why these values replace the steps in the model, and the push in flight.
    superseding: str | None = None

    @property
    def version(self) -> VersionId:
        return self.released.version

    def after(self, earlier: Arrival | None) -> Arrival:
        """This version where `earlier` was not handled yet: it contains that, too."""
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
    """Why a push was dropped, and which of its chunks may be in a version nevertheless."""

    code: str
    text: str
    counted: Bitmap | None = None  # None: the broker has not said


@dataclass(frozen=True)
class News:
    """All that arrived since the last poll."""

    # Messages about rounds, in order: a welcome may be from a broker older than versions before it.
    turns: tuple[Turning, ...] = ()
    arrivals: Mapping[int, Arrival] = field(default_factory=dict)  # whole versions, by fragment
    rejections: Mapping[int, Rejection] = field(default_factory=dict)  # dropped pushes, by push id

    def __bool__(self) -> bool:
        return bool(self.turns or self.arrivals or self.rejections)


@dataclass(frozen=True)
class LinkState:
    """The state of the link at one moment. Two are equal if waiting goes on in the same way."""

    config: RunConfig = field(compare=False)
    # The broker's H for this worker (Dynamic Local Updates).
    sync_every: int | None = field(default=None, compare=False)
    phase: Phase = Phase.JOINED
    reconnections: int = 0  # welcomes after the first
    uploaded: frozenset[int] = frozenset()  # pushes in flight of which the broker has all chunks
    put_off: frozenset[int] = frozenset()  # pushes in flight of which it accepts no chunk yet
    has_ended: bool = False  # the I/O thread is gone
    over: str | None = None  # why the run is over for this worker
    is_restarting: bool = False  # the broker announced a restart
    asked_to_stop: str | None = None  # why the process is about to end, so that nothing is awaited
    refusal: str | None = field(default=None, compare=False)  # why the broker refuses this worker
    # Seconds since the last message of the broker; None before the first.
    silence: float | None = field(default=None, compare=False)
    address: str = field(default="", compare=False)  # of the broker
    last_error: str | None = field(default=None, compare=False)
    description: str = field(default="", compare=False)  # ends a sentence


@dataclass(frozen=True)
class Work:
    """Reported work and the latest loss: of a script so far, or of one delta."""

    steps: int = 0
    tokens: int = 0
    samples: int = 0
    loss: float | None = None

    def since(self, before: Work) -> Work:
        """The work that was not done `before`."""
        steps, tokens = self.steps - before.steps, self.tokens - before.tokens
        return Work(steps, tokens, self.samples - before.samples, self.loss)


@dataclass(frozen=True)
class Poll:
    """The arrivals since the last poll, and the state of the link."""

    news: News
    link: LinkState
    totals: Work  # reported by the script up to now; without its steps
