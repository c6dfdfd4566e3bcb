"""The ports through which a boundary acts on the real model, link, script and log.

`sync.boundary` decides. The ports of one of several ranks are in `group.ports`, those of workers that
one thread steps in turn in `testing`. All of it belongs to the training thread.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

from diloco_protocol import ModelLayout, RunConfig, UsageError, VersionId
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.clients.keys import Keys
from diloco_protocol.messages import Join, Progress, Push
from diloco_protocol.tensors.threads import thread_count
from diloco_worker.joining import await_versions, new_session
from diloco_worker.model.checksums import checksums, frozen_tag
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.model_watch import Constants
from diloco_worker.model.placement import Placement
from diloco_worker.model.spread.ranks import FORCE, LOAD, SAVE, STEP
from diloco_worker.push_log import PushLog
from diloco_worker.reports import Reports
from diloco_worker.saved_state import Plain, Resumption, SavedFragment, to_plain
from diloco_worker.session.downloads import Held
from diloco_worker.session.events import BeatNow, Event, Resume
from diloco_worker.session.news import Arrival, LinkState, News, Poll, Work
from diloco_worker.session.session import Session
from diloco_worker.settings import Settings
from diloco_worker.sync import boundary
from diloco_worker.sync.fragment import InFlight, Merge, TrainingBase
from diloco_worker.sync.merge import FragmentValues
from diloco_worker.sync.metrics import SyncMetrics
from diloco_worker.sync.ports import MergeFailed, NonFinite, finish
from diloco_worker.sync.schedule import RoundSchedule
from diloco_worker.sync.state import Options, SyncState
from diloco_worker.transport.broker_address import Given
from diloco_worker.transport.link import Link
from diloco_worker.transport.sigterm import Termination

logger = logging.getLogger("diloco.worker")

NO_NEWS = News()

T = TypeVar("T")


@dataclass(frozen=True)
class RunFacts:
    """What a script may ask about the run."""

    stop_reason: str | None = None  # why the script should stop; None while it should not
    is_over: bool = False  # whether the run is over
    save_order: int = 0  # the number of the newest request to save
    progress: Progress = field(default_factory=Progress)
    loss: float | None = None  # mean of all workers, of the last round


@dataclass(eq=False, repr=False, kw_only=True)
class Participant:
    """The parts of a worker that joins a run."""

    server: Given
    worker_id: str
    tensors: ModelTensors
    settings: Settings
    keys: Keys | None
    placement: Placement  # of the vectors
    audit: PushLog
    termination: Termination
    reports: Reports
    metrics: SyncMetrics  # updated by the boundaries
    publish: Callable[[bool], None]  # sets the next heartbeat; True: training waits
    step: int  # optimizer steps at joining
    cycle_start: int  # optimizer steps when the cycle of slots began
    resumption: Resumption | None  # the checkpoint to resume from; the model is loaded from it
    # Called with the link before it is started: from then on the worker closes it.
    opened: Callable[[Any], None]


@dataclass(eq=False, repr=False, kw_only=True)
class LocalPorts(Participant):
    """`sync.ports.Ports` of a worker of one process, and what its hook calls."""

    link: Link = field(init=False)
    arrived: dict[int, Arrival] = field(default_factory=dict)  # by fragment, to begin with
    fragments: list[FragmentValues] = field(default_factory=list)
    state: SyncState = field(init=False)  # the state of the boundaries
    has_left: bool = False

    def __post_init__(self) -> None:
        self._shown: LinkState | None = None  # as of the last poll

    # Before training.

    def join(self) -> LocalPorts:
        """Join and put the run's parameters into the model; raises as `DiLoCoWorker.start`."""
        tag_of = partial(frozen_tag, self.tensors)
        link = self.connect(self.session(), capture=self.tensors.capture, tag_of=tag_of)
        self.arrived = await_versions(link)
        assert link.layout is not None
        if link.has_forgotten:
            self.resumption = None
        self.tensors.set_layout(link.layout)
        self.begin()
        return self

    def session(self, processes: int | None = None) -> Session:
        """The session of this worker; `processes`: of a group, else None."""
        own, resumption = self.settings, self.resumption
        join = Join(
            self.worker_id,
            self.tensors.manifest,
            wants=own.wants,
            extra=dict(own.extra or {}),
            processes=processes or 1,
        )
        is_group = processes is not None
        session = new_session(join, own.heartbeat_interval, is_group=is_group, has_frozen=True)
        if resumption is not None:
            session.handle(Resume(resumption.terms, resumption.held), self.clock())
        return session

    def connect(self, session: Session | None, **arguments: Any) -> Link:
        """Start the link; the arguments are those of `Link`."""
        link = None
        states: dict[int, dict[VersionId | None, FlatState]] = {}
        if self.resumption is not None:  # a session knows its version; a follower has to name it
            for fragment, state in self.resumption.states.items():
                held = None if session is not None else self.resumption.held[fragment].version
                states[fragment] = {held: state}
        try:
            link = self.link = Link(
                self.server,
                session,
                pinned=self.placement.is_pinned,
                states=states,
                welcomed=self.audit.joined,
                keys=self.keys,
                **arguments,
            )
            self.opened(link)
        except BaseException:  # once opened, the worker closes it
            if link is not None:
                link.close()
            raise
        link.start(thread_count(self.settings.tensor_threads))
        if self.settings.handle_signals is not False:
            self.termination.install()
        return link

    def begin(self) -> None:
        """Begin with the run's parameters, or with those of a checkpoint that fits the run."""
        terms, resumption = self.link.terms, self.resumption
        self.resumption = None  # releases its values
        assert terms is not None
        layout = terms.layout
        self._frozen = self._take_frozen(layout.frozen)
        arrivals = self.take([part.fragment for part in layout.fragments])
        if resumption is not None:
            saved = resumption.fragments
        else:
            values = [self.values_of(each) for each in arrivals]
            bases = [TrainingBase(each.version, each.released.ledger) for each in arrivals]
            saved = tuple(
                SavedFragment(base, each)
                for base, each in zip(bases, values, strict=True)
                if each is not None
            )
            for each in saved:
                self.tensors.put(each.values)
        self.stand_on(saved, layout, terms.config)
        self.state = SyncState(
            worker_id=self.worker_id,
            ports=self,
            link=self.of_leader(self._described),
            options=Options(
                **{each.name: getattr(self.settings, each.name) for each in fields(Options)}
            ),
            chunks=[part.chunks for part in layout.fragments],
            bases=[each.base for each in saved],
            totals=self.read_reports(),
            step=self.step,
            cycle_start=self.cycle_start,
            metrics=self.metrics,
        )
        if resumption is None:
            finish(boundary.poll(self.state))
        else:
            finish(boundary.resume(self.state, resumption.place, self.cycle_start, arrivals))

    def _take_frozen(self, part: FragmentLayout) -> Held | None:
        """Put the frozen parameters into the model, which has the only copy; returns their version."""
        if not part.chunks:
            return None
        (arrival,) = self.take([part.fragment])
        values = self.values_of(arrival)
        if values is not None:  # else the model has them
            self.tensors.put(values)
        self.set_base(part.fragment, None)
        return Held(arrival.version, arrival.released.ledger)

    def take(self, fragments: Sequence[int]) -> list[Arrival]:
        """Take the versions of these fragments to begin with."""
        return self.of_leader(lambda: [self.arrived.pop(fragment) for fragment in fragments])

    def of_leader(self, find: Callable[[], T]) -> T:
        """The result of the process that has the session: at all ranks of a worker the leader's."""
        return find()

    def values_of(self, arrival: Arrival) -> FlatState | None:
        """This process's values of an arrived version."""
        found: FlatState | None = arrival.values
        return found

    def stand_on(
        self, saved: Sequence[SavedFragment], layout: ModelLayout, config: RunConfig
    ) -> None:
        """Make the values of each fragment, with the model as it is now."""
        self._constants = Constants(self.tensors.live)
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
        """Set the values that the deltas of a fragment are measured from."""
        self.link.set_base(fragment, base, came_as)

    # What the hook calls.

    @property
    def schedule(self) -> RoundSchedule:
        return self.state.schedule

    @property
    def unsynced_steps(self) -> int:
        return self.state.unsynced_steps

    def stepped(self, step: int) -> bool:
        """An optimizer step was made; returns whether there is anything to do after it."""
        self.state.step = step
        return not self.is_idle

    def after_step(self) -> None:
        self.run(STEP, partial(boundary.after_step, step=self.state.step))

    def force(self) -> bool:
        return bool(self.run(FORCE, boundary.force))

    def load(self) -> bool:
        return bool(self.run(LOAD, boundary.load))

    def put_global(self) -> None:
        """Put the global parameters received last into the model."""
        for each in self.fragments:
            self.tensors.put(each.base)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do after this step."""
        return not self.reports.pending and self.state.is_calm and not self.has_news()

    def run(self, call: str, steps: Callable[[SyncState], Coroutine[Any, Any, T]]) -> T | None:
        """Run a boundary for a call of the script; None once the worker has left."""
        if self.has_left:
            return None
        self.meet(call)
        self.reports.read(self.clock())
        return finish(steps(self.state))

    def leave(self, *, hasty: bool) -> None:
        """Wait for pushes in flight."""
        self.has_left = True
        if not self.link.has_ended:
            finish(boundary.leave(self.state, hasty=hasty))

    def saved_state(self) -> tuple[Plain | None, None]:
        """Parameters and deltas for the checkpoint of a script, and no outer optimizer.

        None, with a warning, while a merge is interrupted, or once the model lacks tensors of the run.
        """
        state, terms = self.state, self.link.terms
        assert terms is not None
        self.meet(SAVE)
        try:
            problem = "A merge was interrupted; save again after the next step."
            sums = None if state.is_partial else self.checksums()
        except UsageError as error:  # saving must not end the script
            problem, sums = str(error), None
        if sums is None:
            logger.warning(
                "%s Until then the saved state has no parameters: a worker that resumes from it begins "
                "with the run's.",
                problem,
            )
            return None, None
        fragments = tuple(
            SavedFragment(
                base, each.base, None if base.in_flight is None else each.delta, each.saved_feedback
            )
            for base, each in zip(
                state.training_bases(self.read_reports()), self.fragments, strict=True
            )
        )
        place = state.schedule.place
        resumption = Resumption(state.worker_id, terms, place, self._frozen, fragments, sums)
        return self.to_save(to_plain(resumption, self.tensors.manifest)), None

    def meet(self, call: str) -> None:
        """Called for each call of the script; the ranks of a worker synchronise here."""

    @property
    def is_asked(self) -> bool:
        """Whether a process of this worker received SIGTERM."""
        return self.termination.is_asked

    @property
    def facts(self) -> RunFacts:
        link = self.link
        return RunFacts(
            stop_reason=self.termination.reason or link.stopping,
            is_over=link.stopping is not None,
            save_order=link.save_order,
            progress=link.run_progress,
            loss=link.run_loss,
        )

    def checksums(self) -> Mapping[str, tuple[int, ...]]:
        """Checksums of the model; raises UsageError where it lacks tensors of the run."""
        return checksums(self.tensors)

    def to_save(self, plain: Plain) -> Plain:
        """This process's part of the saved state."""
        return plain

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
        """Block until something arrives or changes, or for these seconds."""
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
        return self.of_leader(lambda: self.link.reconnections)

    def clock(self) -> float:
        return time.monotonic()

    def draw(self) -> int:
        return self.of_leader(lambda: secrets.randbits(64))

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


# By address of a broker in this process, what makes the ports of its workers; see `testing`.
PORTS: dict[str, Callable[..., LocalPorts]] = {}
