"""The ports of a boundary in a training process: the real model, link, script and log."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from diloco_protocol import ModelLayout, RunConfig, VersionId
from diloco_protocol.messages import Progress, Push
from diloco_worker.model.checksums import checksums
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.placement import Placement
from diloco_worker.model.values import Constants
from diloco_worker.push_log import PushLog
from diloco_worker.reports import Reports
from diloco_worker.saved_state import Plain, SavedFragment
from diloco_worker.session.events import BeatNow, Event
from diloco_worker.session.news import Arrival, LinkState, News, Poll, Work
from diloco_worker.sync.fragment import InFlight, Merge
from diloco_worker.sync.merge import FragmentValues
from diloco_worker.sync.ports import MergeFailed, NonFinite
from diloco_worker.transport.link import Link
from diloco_worker.transport.sigterm import Termination

logger = logging.getLogger("diloco.worker")

NO_NEWS = News()


@dataclass(frozen=True)
class RunFacts:
    """What a script may ask about the run."""

    stop_reason: str | None = None  # why the script should stop; None while it should not
    is_asked: bool = False  # a process of this worker received SIGTERM
    is_over: bool = False  # the run is
    save_order: int = 0  # the number of the newest order to save
    progress: Progress = field(default_factory=Progress)
    loss: float | None = None  # mean of all workers, of the last round


@dataclass(eq=False, repr=False, kw_only=True)
class LocalPorts:
    """`sync.ports.Ports` of a process that is a worker by itself. Belongs to the training thread."""

    tensors: ModelTensors
    link: Link
    reports: Reports
    publish: Callable[[bool], None]  # makes the next heartbeat; True: training waits
    audit: PushLog
    termination: Termination
    clock: Callable[[], float]
    placement: Placement  # of the vectors
    arrived: dict[int, Arrival]  # of each fragment, the version to begin with
    fragments: list[FragmentValues] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._shown: LinkState | None = None  # as of the last poll

    # Before training.

    def link_state(self) -> LinkState:
        """How the link stands when training begins."""
        return self._described()

    def take(self, fragments: Sequence[int]) -> list[Arrival]:
        """The versions of these fragments to begin with."""
        return [self.arrived.pop(fragment) for fragment in fragments]

    def values_of(self, arrival: Arrival) -> FlatState | None:
        """The values of a version that has arrived, as far as they are this process's."""
        found: FlatState | None = arrival.values
        return found

    def stand_on(
        self, saved: Sequence[SavedFragment], layout: ModelLayout, config: RunConfig
    ) -> None:
        """Training of each fragment goes on from here, with the model as it is now."""
        self._constants = Constants(self.tensors)
        self.fragments = [
            FragmentValues(
                self.tensors.share_of(part),
                self.tensors,
                config,
                base=each.values,
                delta=each.delta,
                set_base=self.set_base,
                kept_on=self.placement.base,
                saved=each.feedback,
            )
            for part, each in zip(layout.fragments, saved, strict=True)
        ]

    def set_base(
        self, fragment: int, base: FlatState | None, came_as: FlatState | None = None
    ) -> None:
        """Training of a fragment stands on these values from now on."""
        self.link.set_base(fragment, base, came_as)

    # The script and its hook.

    def meet(self, call: str) -> None:
        """The script makes this call now; the ranks of a worker make it together."""

    @property
    def facts(self) -> RunFacts:
        link = self.link
        return RunFacts(
            stop_reason=self.termination.reason or link.stopping,
            is_asked=self.termination.is_asked,
            is_over=link.stopping is not None,
            save_order=link.save_order,
            progress=link.run_progress,
            loss=link.run_loss,
        )

    def checksums(self) -> Mapping[str, tuple[int, ...]]:
        """Those of the model, for its checkpoint; raises UsageError where it is another model."""
        return checksums(self.tensors)

    def to_save(self, plain: Plain) -> Plain:
        """What this process saves of the worker's state."""
        return plain

    def leave(self, steps: Callable[[], object], *, hasty: bool) -> None:
        """Leave the run by these steps."""
        if not self.link.has_ended:
            steps()

    # The link.

    def has_news(self) -> bool:
        return self._has_arrivals

    def poll(self) -> Poll:
        news = self.link.take_news() if self._has_arrivals else NO_NEWS
        return Poll(news, self._described(), self.reports.totals)

    async def wait(self, seconds: float) -> Poll:
        self._listen(seconds)
        return self.poll()

    def _listen(self, seconds: float) -> None:
        """Block until there may be something for `poll`."""
        with self.termination.waiting():
            self.link.wait_for(lambda: self._has_arrivals or self._has_changed, seconds)

    def _described(self) -> LinkState:
        self._shown = self.link.described(self.termination.reason)
        return self._shown

    @property
    def _has_arrivals(self) -> bool:
        return self.link.has_news or bool(self.link.turns)

    @property
    def _has_changed(self) -> bool:
        return self.link.described(self.termination.reason) != self._shown

    def notify(self, event: Event) -> None:
        self.link.tell(event)

    def offer(self, in_flight: InFlight, *, is_new: bool) -> int:
        if is_new:
            self.audit.frozen(in_flight)
        delta = self.fragments[in_flight.push.fragment].delta
        assert delta is not None
        self.link.offer(in_flight.push, delta.wire)
        return self.link.reconnections

    def draw(self) -> int:
        return secrets.randbits(64)

    # The model.

    def check_model(self) -> None:
        watch = self.tensors.watch
        changed = watch.look() if watch is not None else None
        if changed is not None:
            self.trouble(changed)

    async def freeze(self, push: Push) -> Push | NonFinite:
        norm = self.fragments[push.fragment].freeze(push.wire_dtype)
        for change in self._constants.warnings():
            self.trouble(change)
        return norm if isinstance(norm, NonFinite) else replace(push, norm=norm)

    def keep_anchor(self, fragment: int) -> None:
        self.fragments[fragment].keep_anchor()

    async def merge(self, fragment: int, merge: Merge, step: int) -> None:
        try:
            self.fragments[fragment].apply(merge, step)
        except Exception as error:
            raise MergeFailed from error

    def has_begun(self, fragment: int, merge: Merge) -> bool:
        return self.fragments[fragment].has_begun(merge)

    # The script, its displays and its log.

    def read_reports(self) -> Work:
        self.reports.read(self.clock(), at_once=True)
        return self.reports.totals

    def show_waiting(self) -> None:
        self.publish(True)

    def beat(self) -> None:
        self.publish(False)
        self.link.tell(BeatNow())

    def log(self, text: str, *, is_warning: bool = False) -> None:
        logger.log(logging.WARNING if is_warning else logging.INFO, "%s", text)

    def trouble(self, text: str, cause: BaseException | None = None) -> None:
        if cause is not None:
            logger.debug("The merge that failed:", exc_info=cause)
        logger.warning("%s", text)
        self.link.last_error = text

    def push_ended(
        self, push_id: int, fragment: int, version: VersionId | None = None, why: str = ""
    ) -> None:
        self.audit.ended(push_id, fragment, version, why)
