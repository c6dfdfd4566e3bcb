"""The records of a delta under way: the flight, when its reply is merged, and how it lands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from diloco_protocol import RunConfig, VersionId
from diloco_protocol.fragments import longest_delay
from diloco_protocol.messages import Push
from diloco_worker.core.sync.news import Arrival, Rejection


class Outcome(str, Enum):
    """What a look at a fragment has brought."""

    NOTHING = "nothing"
    COUNTED = "counted"  # the flight is in the version that is the base now
    MOVED = "moved"  # there was no flight; a newer version is the base now
    REJECTED = "rejected"  # the flight has ended; the base is what it was
    SUPERSEDED = (
        "superseded"  # the base took the place of the steps in the model; no flight any more
    )
    RESTORED = "restored"  # the steps since the last freeze are out of the model
    LOADED = "loaded"  # a version is in the model as it is
    FAILED = "failed"  # the model could not be changed; the next look goes on with it


@dataclass(frozen=True)
class MergeRule:
    """How a reply comes into the model, and when; from the run's configuration.

    Attributes:
        rebases: "rebase" instead of the paper's "alpha".
        alpha: weight of the local values.
        delay: tau, steps from the freeze to the apply point.
        max_delay: steps from the freeze after which training waits for the reply; at least tau. None:
            what goes with H, see `diloco_protocol.fragments.longest_delay`.
        is_auto: the apply point is when the reply is here, so none comes late before training waits.
        num_fragments: P.
    """

    rebases: bool = False
    alpha: float = 0.0
    delay: int = 0
    max_delay: int | None = 0
    is_auto: bool = False
    num_fragments: int = 1

    @classmethod
    def of(cls, config: RunConfig) -> MergeRule:
        tau, latest, is_auto = (
            config.fragment_sync_delay,
            config.fragment_max_delay,
            config.fragment_delay_auto,
        )
        if latest is None and not is_auto:
            latest = tau
        return cls(
            rebases=config.fragment_merge == "rebase",
            alpha=config.fragment_update_alpha,
            delay=tau,
            max_delay=None if latest is None else max(tau, latest),
            is_auto=is_auto,
            num_fragments=config.num_fragments,
        )

    @property
    def overlaps(self) -> bool:
        """Whether training may go on behind a freeze."""
        return self.max_delay != 0

    def longest(self, sync_every: int) -> int:
        """Steps from the freeze after which training waits for the reply, with this H."""
        if self.max_delay is not None:
            return self.max_delay
        return longest_delay(sync_every, self.num_fragments)


@dataclass
class Flight:
    """A frozen delta under way; its values are with the tensors.

    Attributes:
        push: the offer: push id, the version it was computed from, what was done for it.
        began: the optimizer step behind which it was frozen.
        apply_at: the step behind which its reply is merged, not earlier.
        wait_at: the step behind which training waits for the reply.
        reconnections: of the link, when the flight began.
        let_go: training has ceased to wait for it.
        is_offered: the link has it.
    """

    push: Push
    began: int
    apply_at: int
    wait_at: int
    reconnections: int = 0
    let_go: bool = False
    is_offered: bool = False

    @property
    def push_id(self) -> int:
        return self.push.push_id

    @property
    def base(self) -> VersionId:
        assert self.push.base is not None
        return self.push.base

    @property
    def steps(self) -> int:
        """Optimizer steps in it."""
        return self.push.steps


@dataclass(frozen=True, eq=False)
class Landing:
    """What a look has brought. Not in the model before somebody has brought it there.

    Attributes:
        flight: the one that was under way.
        arrival: the version that has come.
        rejection: why the flight has ended without one.
        touches_model: False leaves the model as it is, on its base.
        is_load: a version was asked for, to be in the model as it is.
        is_void: the local values are of no use, so no step is kept that is made while this is broken
            off.
    """

    outcome: Outcome
    flight: Flight | None = None
    arrival: Arrival | None = None
    rejection: Rejection | None = None
    touches_model: bool = True
    is_load: bool = False
    is_void: bool = False
