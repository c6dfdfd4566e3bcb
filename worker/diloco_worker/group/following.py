"""A process that does not lead: it carries out the leader's orders on its share of the model.

It stands where the driver stands in the process that leads, and its link where that one's link does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import torch

from diloco_protocol import Ledger, ModelLayout, RunConfig, UsageError, VersionId
from diloco_protocol.messages import Heartbeat, Progress
from diloco_protocol.version import from_hex
from diloco_worker.group import orders
from diloco_worker.group.leading import DEED_OF, others_of
from diloco_worker.group.orders import Agreed
from diloco_worker.model.checksums import checksums
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.spread.ranks import SAVE, STEP, GroupBroken, Ranks
from diloco_worker.model.spread.spread_tensors import SpreadTensors
from diloco_worker.session import events
from diloco_worker.session.compatibility import Terms
from diloco_worker.sync.fragment import TrainingBase
from diloco_worker.sync.patience import HASTY_S
from diloco_worker.training.fragment_sync import FragmentSync
from diloco_worker.training.reports import Reports
from diloco_worker.training.resumption import Resumption, SavedFragment
from diloco_worker.training.saved_state import (
    Plain,
    vectors_of,
    vectors_of_delta,
    vectors_of_feedback,
)
from diloco_worker.training.settings import Settings
from diloco_worker.transport.lanes.lane import LaneThread
from diloco_worker.transport.sigterm import Termination

logger = logging.getLogger("diloco.worker")

# Seconds that the leader may take to leave, besides those that it waits for what is in flight.
LEADER_LEAVES_WITHIN_S = 10.0


class LaneLink:
    """What the link of the leader knows, as far as it was told here at the last step."""

    def __init__(self, lane: LaneThread) -> None:
        self.lane = lane
        self.terms: Terms | None = None  # until the leader tells
        self.shard: tuple[int, int] | None = None
        self.agreed = Agreed()
        self.progress: Heartbeat | None = None  # nobody asks
        self.bytes_up = self.bytes_down = self.retries = self.reconnections = 0
        self.own_error: str | None = None
        self.dropped_units: dict[str, Any] = {}
        self.results: dict[int, Any] = {}

    @property
    def config(self) -> RunConfig | None:
        return self.terms.config if self.terms else None

    @property
    def layout(self) -> ModelLayout | None:
        return self.terms.layout if self.terms else None

    @property
    def stopping(self) -> str | None:
        return self.agreed.stop_reason if self.agreed.is_over else None

    @property
    def save_order(self) -> int:
        return self.agreed.save_order

    @property
    def run_progress(self) -> Progress:
        return self.agreed.progress

    @property
    def run_loss(self) -> float | None:
        return self.agreed.loss

    @property
    def last_error(self) -> str | None:
        return self.own_error or self.lane.last_error or self.agreed.last_error

    @last_error.setter
    def last_error(self, text: str | None) -> None:
        self.own_error = text

    @property
    def has_ended(self) -> bool:
        return self.lane.has_ended

    def tell(self, event: events.Event) -> None:
        """Only the leader speaks to the broker; raises UsageError for what only it may ask for."""
        if isinstance(event, events.TakeUnits):
            raise UsageError(
                "Units of a work queue are handed to the first process of a worker; take them there, "
                "and give them to the others with torch.distributed."
            )

    def wake(self) -> None:
        """Nothing waits here that a signal could wake: the leader's word ends the waiting."""

    def close(self, reason: str, patience: float) -> None:
        self.lane.close(patience)


@dataclass
class FollowedSchedule:
    """What is told of the leader's schedule."""

    sync_every: int = 1
    cycle_start: int = 0

    def position(self, step: int) -> int:
        return step - self.cycle_start

    def restart(self, step: int) -> None:
        """The leader's is what counts."""


@dataclass
class FollowedState:
    """What is told of the leader's state."""

    step: int
    schedule: FollowedSchedule = field(default_factory=FollowedSchedule)
    unsynced_steps: int = 0


@dataclass(eq=False, repr=False, kw_only=True)
class Follower:
    """See the head of this module. Begins with what the leader's driver begins with."""

    ranks: Ranks
    tensors: SpreadTensors
    link: LaneLink
    settings: Settings
    reports: Reports
    metrics: Any  # SyncMetrics, set as the leader tells
    termination: Termination
    clock: Callable[[], float]
    step: int
    resumption: Resumption | None
    state: FollowedState = field(init=False)

    def __post_init__(self) -> None:
        self.state = FollowedState(self.step)
        self._fragments: list[FragmentSync] = []
        self._follow()

    @property
    def agreed(self) -> Agreed:
        return self.link.agreed

    @property
    def bases(self) -> list[FlatState]:
        return [each.base for each in self._fragments]

    def trouble(self, text: str) -> None:
        logger.warning("%s", text)
        self.link.last_error = text

    def after_step(self, step: int) -> None:
        self.ranks.meet(STEP, float(self.termination.is_asked))
        self.reports.read(self.clock())
        self._follow()

    def between_steps(self, action: object) -> Any:
        """The leader makes what the script asks for here, too. Returns what came of it there."""
        self.ranks.meet(DEED_OF[action])
        self._follow()
        return self.agreed.result

    def leave(self, *, hasty: bool) -> None:
        """The leader waits for what is in flight; some of it goes over the connection of this one.

        It may have left before this process came here: its last word is counted all the same.
        """
        patience = HASTY_S if hasty else self.settings.timeout
        lane = self.link.lane
        lane.wait_for_the_end(patience + LEADER_LEAVES_WITHIN_S)
        if lane.last_word:
            self._count(msgpack.unpackb(lane.last_word))

    def saved(self) -> Plain | None:
        """This process's part of what the worker saves; the leader has what is the same for all."""
        self.ranks.meet(SAVE)
        self.ranks.broadcast()
        sums = checksums(self.tensors)
        told = self.ranks.broadcast()
        if told is None:
            return None
        fragments = []
        for plain, each in zip(told["fragments"], self._fragments, strict=True):
            dropped = [from_hex(of["push_id"]) for of in plain["dropped"]]
            made = {
                **plain,
                "base": vectors_of(each.base, copy=True),
                **vectors_of_feedback(each.saved_feedback, dropped),
            }
            if plain["flight"] is not None:
                assert each.delta is not None
                made["flight"] = {**plain["flight"], **vectors_of_delta(each.delta)}
            fragments.append(made)
        kept = {name: list(of) for name, of in sums.items()}
        plain = {**told, "fragments": fragments, "checksums": kept}
        return self.tensors.shared_out(plain, self.reports.counts)

    # Orders.

    def _follow(self) -> None:
        """Carry out orders until training goes on. What fails here, ends the worker."""
        while True:
            order = self.ranks.broadcast()
            if order[0] == orders.GO:
                self._take(Agreed.from_plain(order[1]))
                return
            try:
                self._carry_out(order)
            except GroupBroken:
                raise
            except Exception as error:
                raise GroupBroken(
                    f"This process could not do its part ({order[0]}): {error!r}"
                ) from error

    def _take(self, agreed: Agreed) -> None:
        self.link.agreed = agreed
        self._count(agreed.metrics)
        self.state.unsynced_steps = agreed.unsynced_steps
        self.state.schedule.sync_every = agreed.sync_every
        self.state.schedule.cycle_start = agreed.cycle_start

    def _count(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            setattr(self.metrics, name, value)

    def _carry_out(self, order: Any) -> None:  # noqa: C901, PLR0912  a case for each order
        name, *rest = order
        match name:
            case orders.WAIT:
                self._wait()
            case orders.FAIL:
                raise GroupBroken(rest[0])
            case orders.FROZEN:
                if rest[0] is not None:
                    frozen = self._terms.layout.frozen.fragment
                    self.tensors.put(self._values(frozen, rest[0]))
            case orders.PUT:
                begun = [
                    SavedFragment(
                        TrainingBase(VersionId.from_plain(each), Ledger()),
                        self._values(number, each),
                    )
                    for number, each in enumerate(rest[0])
                ]
                for saved in begun:
                    self.tensors.put(saved.values)
                self._stand_on(begun)
            case orders.RESUME:
                assert self.resumption is not None
                self._stand_on_checkpoint(self.resumption)
            case orders.CHECK:
                watch = self.tensors.watch
                self.ranks.gather(watch.look() if watch is not None else None)
            case orders.REPORT:
                self.reports.read(self.clock(), at_once=True)
                others_of(self.ranks, self.reports.totals)
            case orders.FREEZE:
                fragment, dtype = rest
                self._fragments[fragment].freeze(dtype)
            case orders.ANCHOR:
                self._fragments[rest[0]].keep_anchor()
            case orders.OFFER:
                fragment, push_id = rest
                delta = self._fragments[fragment].delta
                assert delta is not None
                self.link.lane.lay_out(push_id, delta.wire)
            case orders.LAND:
                version = orders.version_in(order)
                found = None if version is None else self.link.lane.take(order[1], version)
                self._fragments[order[1]].land(orders.landing_of(order, found), order[-1])
            case _:
                raise GroupBroken(f"The leader asks for {name!r}, which is unknown here.")

    def _wait(self) -> None:
        """A fragment is waited for: nothing is to be done, and the leader is alive."""

    @property
    def _terms(self) -> Terms:
        assert self.link.terms is not None
        return self.link.terms

    def _values(self, fragment: int, version: Any) -> FlatState:
        return self.link.lane.take(fragment, VersionId.from_plain(version))

    def _stand_on_checkpoint(self, resumption: Resumption) -> None:
        assert self.link.lane.buffers is not None
        for each in resumption.fragments:
            self.link.lane.buffers.stand_on(
                each.values.layout.fragment, each.base.version, each.values
            )
        self._stand_on(resumption.fragments)

    def _stand_on(self, fragments: Sequence[SavedFragment]) -> None:
        assert self.link.lane.buffers is not None
        self._fragments = [
            FragmentSync(
                self.tensors.share_of(part),
                self.tensors,
                self._terms.config,
                base=each.values,
                delta=each.delta,
                set_base=self.link.lane.buffers.set_base,
                kept_on=torch.device("cpu"),
                saved=each.feedback,
            )
            for part, each in zip(self._terms.layout.fragments, fragments, strict=True)
        ]
