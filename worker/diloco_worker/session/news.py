"""What the training thread sees: what has arrived, the state of the link, the work of the script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_protocol import Bitmap, RunConfig, VersionId
from diloco_protocol.messages import Grant, Notice, Released, Welcome
from diloco_worker.session.connection import Phase

# What moves the cursor in the sequence of rounds: `Notice` that a push is carried into a later round;
# `Released` stands for a version that is here, whole.
Turning = Welcome | Grant | Notice | Released


@dataclass(frozen=True)
class Arrival:
    """A whole version."""

    released: Released  # its name, ledger and round
    counted: frozenset[int]  # push ids of this worker in flight until now that it contains whole
    values: Any  # as the shell keeps them, which only the shell looks at; None: no copy is kept
    staleness: int | None = None  # between the counted push's base and here, if the broker has told
    # Why these values take the place of the steps in the model, and of the push in flight.
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
    """Why a push was dropped, and which of its chunks may be in a version all the same."""

    code: str
    text: str
    counted: Bitmap | None = None  # None: the broker has not said


@dataclass(frozen=True)
class News:
    """All that has arrived since the last poll."""

    # What concerns rounds and whose turn it is, in the order in which it came: a welcome may be from a
    # broker that has gone back behind the versions here before it.
    turns: tuple[Turning, ...] = ()
    arrivals: Mapping[int, Arrival] = field(default_factory=dict)  # whole versions, by fragment
    rejections: Mapping[int, Rejection] = field(default_factory=dict)  # dropped pushes, by push id

    def __bool__(self) -> bool:
        return bool(self.turns or self.arrivals or self.rejections)


@dataclass(frozen=True)
class LinkState:
    """How things stand with the broker, at one moment.

    Two are equal if waiting goes on with both alike.
    """

    config: RunConfig = field(compare=False)
    # H that the broker has worked out for this worker (Dynamic Local Updates).
    sync_every: int | None = field(default=None, compare=False)
    phase: Phase = Phase.JOINED
    reconnections: int = 0  # welcomes after the first
    uploaded: frozenset[int] = frozenset()  # pushes in flight whose chunks are all in at the broker
    put_off: frozenset[int] = frozenset()  # pushes in flight that the broker takes nothing of yet
    has_ended: bool = False  # nothing comes or goes any more
    over: str | None = None  # why the run has ended, or has for this worker
    is_restarting: bool = False  # the broker has gone away to come back
    asked_to_stop: str | None = None  # why the process is about to end: nothing is waited for
    refusal: str | None = field(default=None, compare=False)  # why the broker refuses this worker
    # Seconds since the broker last said anything; None when it never has.
    silence: float | None = field(default=None, compare=False)
    address: str = field(default="", compare=False)  # of the broker
    last_error: str | None = field(default=None, compare=False)
    description: str = field(default="", compare=False)  # of what the link is at, ends a sentence


@dataclass(frozen=True)
class Work:
    """What was done, and the latest loss: by a script up to now, or for one delta."""

    steps: int = 0
    tokens: int = 0
    samples: int = 0
    loss: float | None = None

    def since(self, before: Work) -> Work:
        """What of it was not done `before`."""
        steps, tokens = self.steps - before.steps, self.tokens - before.tokens
        return Work(steps, tokens, self.samples - before.samples, self.loss)


@dataclass(frozen=True)
class Poll:
    """What has arrived since the last poll, and how things stand."""

    news: News
    link: LinkState
    totals: Work  # reported by the script up to now; without its steps
