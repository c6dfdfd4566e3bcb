"""Carries out for the hook what `sync.boundary` decides, on the model, the link and the log.

Belongs to the training thread. An exception or Ctrl-C in the middle of an effect drops the rest; what
was decided and not done is done behind the next step.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import TypeVar

from diloco_protocol import UsageError
from diloco_protocol.chunks import FragmentLayout
from diloco_worker.model.checksums import checksums
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.placement import Placement
from diloco_worker.model.values import Constants
from diloco_worker.session import events
from diloco_worker.session.downloads import Held
from diloco_worker.session.news import Arrival, LinkState, News, Sight
from diloco_worker.sync import boundary, effects
from diloco_worker.sync.effects import Answer, Effect, Steps
from diloco_worker.sync.fragment import TrainingBase
from diloco_worker.sync.landings import look
from diloco_worker.sync.metrics import SyncMetrics
from diloco_worker.sync.patience import Options
from diloco_worker.sync.resumption import resume
from diloco_worker.sync.state import SyncState
from diloco_worker.training.fragment_sync import FragmentSync
from diloco_worker.training.push_log import PushLog
from diloco_worker.training.reports import Reports
from diloco_worker.training.resumption import Resumption, SavedFragment
from diloco_worker.training.saved_state import Plain, to_plain
from diloco_worker.training.settings import Settings
from diloco_worker.transport.link import Link
from diloco_worker.transport.sigterm import Termination

logger = logging.getLogger("diloco.worker")

NO_NEWS = News()
T = TypeVar("T")


@dataclass(eq=False, repr=False, kw_only=True)
class Driver:
    """See the head of this module. The layout's fragments have all arrived at the link."""

    worker_id: str
    tensors: ModelTensors
    link: Link
    settings: Settings
    reports: Reports
    metrics: SyncMetrics  # what happens is counted in them
    publish: Callable[[bool], None]  # makes the next heartbeat; True: training stands still
    audit: PushLog
    termination: Termination
    clock: Callable[[], float]  # seconds, monotonic
    placement: Placement  # of the vectors
    step: InitVar[int]  # optimizer steps so far
    cycle_start: InitVar[int]  # those when the cycle of slots began
    resumption: InitVar[Resumption | None]  # what to go on from; the model is as it was then
    state: SyncState = field(init=False)  # what the boundary decides by

    def __post_init__(self, step: int, cycle_start: int, resumption: Resumption | None) -> None:
        link, tensors, layout = self.link, self.tensors, self.link.layout
        assert link.config is not None and layout is not None
        self._frozen = self._take_frozen(layout.frozen)
        arrivals = [_take(link, part.fragment) for part in layout.fragments]
        if resumption is not None:
            saved = resumption.fragments
        else:
            self._put(arrivals)
            saved = tuple(
                SavedFragment(TrainingBase(each.version, each.released.ledger), each.values)
                for each in arrivals
            )
        self._fragments = [
            FragmentSync(
                tensors.share_of(part),
                tensors,
                link.config,
                base=each.values,
                delta=each.delta,
                set_base=link.set_base,
                kept_on=self.placement.base,
                saved=each.feedback,
            )
            for part, each in zip(layout.fragments, saved, strict=True)
        ]
        self._shown = self._link_state()  # what the boundary knows of
        self.state = SyncState(
            worker_id=self.worker_id,
            link=self._shown,
            options=Options(
                **{each.name: getattr(self.settings, each.name) for each in fields(Options)}
            ),
            chunks=[part.chunks for part in layout.fragments],
            bases=[each.base for each in saved],
            totals=self.reports.totals,
            step=step,
            cycle_start=cycle_start,
            metrics=self.metrics,
            clock=self.clock,
            draw=lambda: secrets.randbits(64),
        )
        self._constants = Constants(tensors)
        if resumption is None:
            self.carry_out(look(self.state))
        else:
            self.carry_out(resume(self.state, resumption.place, cycle_start, arrivals))

    def _take_frozen(self, part: FragmentLayout) -> Held | None:
        """Put the frozen parameters into the model, which keeps the only copy; returns their version."""
        if not part.chunks:
            return None
        arrival = _take(self.link, part.fragment)
        self._put_frozen(arrival)
        self.link.set_base(part.fragment, None)
        return Held(arrival.version, arrival.released.ledger)

    def _put_frozen(self, arrival: Arrival) -> None:
        if arrival.values is not None:  # the script has loaded them otherwise
            self.tensors.put(arrival.values)

    def _put(self, arrivals: list[Arrival]) -> None:
        """Begin with these versions."""
        for arrival in arrivals:
            self.tensors.put(arrival.values)

    def saved(self) -> Plain | None:
        """Parameters and deltas for the checkpoint of a script.

        None, with a warning, while a merge is broken off, or once the model has changed so much that the
        run's tensors are not in it.
        """
        state, terms = self.state, self.link.terms
        assert terms is not None
        try:
            problem = "A merge was interrupted; save again after the next step."
            sums = None if state.is_torn else checksums(self.tensors)
        except UsageError as error:  # a script that saves must not end by it
            problem, sums = str(error), None
        if sums is None:
            logger.warning(
                "%s Until then the worker's state does not contain the parameters: a worker that "
                "resumes from it begins with the run's.",
                problem,
            )
            return None
        fragments = tuple(
            SavedFragment(
                base,
                each.base,
                None if base.flight is None else each.delta,
                each.saved_feedback,
            )
            for base, each in zip(
                state.training_bases(self.reports.totals), self._fragments, strict=True
            )
        )
        place = state.schedule.place
        resumption = Resumption(state.worker_id, terms, place, self._frozen, fragments, sums)
        return to_plain(resumption, self.tensors.manifest)

    @property
    def bases(self) -> list[FlatState]:
        """Of each fragment, the values of the version that training stands on."""
        return [each.base for each in self._fragments]

    def after_step(self, step: int) -> None:
        """An optimizer step has been taken. Returns when training may go on."""
        self.reports.read(self.clock())
        self.carry_out(boundary.after_step(self.state, step))

    def trouble(self, text: str) -> None:
        """Something went wrong: for the log, and for `last_error`."""
        logger.warning("%s", text)
        self.link.last_error = text

    def between_steps(self, action: Callable[[SyncState], Steps[T]]) -> T | None:
        """Something that the script asks for; None where it is put off."""
        return self.carry_out(action(self.state))

    def leave(self, *, hasty: bool) -> None:
        if not self.link.has_ended:
            self.carry_out(boundary.leave(self.state, hasty=hasty))

    # Effects.

    def carry_out(self, steps: Steps[T]) -> T:
        """Do what one of the functions of `boundary` decides; returns what it returns."""
        answer: Answer = None
        while True:
            try:
                effect = steps.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            answer = self._do(effect)

    def _do(self, effect: Effect | events.Event) -> Answer:  # noqa: C901, PLR0912  a case for each effect
        link = self.link
        match effect:
            case effects.Look():
                return self._look()
            case effects.Wait(seconds):
                self._wait(seconds)
                return self._look()
            case effects.StandStill():
                self.publish(True)
            case effects.ReadReports():
                self.reports.read(self.clock(), at_once=True)
                return self.reports.totals
            case events.BeatNow():
                self.publish(False)
                link.tell(effect)
            case effects.Offer(flight, is_new):
                if is_new:
                    self.audit.frozen(flight)
                delta = self._fragments[flight.push.fragment].delta
                assert delta is not None
                link.offer(flight.push, delta.wire)
            case events.Event():
                link.tell(effect)
            case effects.PushEnded(push_id, fragment, version, why):
                self.audit.ended(push_id, fragment, version, why)
            case effects.Say(text, is_warning):
                logger.log(logging.WARNING if is_warning else logging.INFO, "%s", text)
            case effects.Trouble(text, cause):
                if cause is not None:
                    logger.debug("The merge that failed:", exc_info=cause)
                self.trouble(text)
            case _:
                return self._change_model(effect)
        return None

    def _change_model(self, effect: Effect | events.Event) -> Answer:
        match effect:
            case effects.CheckModel():
                watch = self.tensors.watch
                changed = watch.look() if watch is not None else None
                if changed is not None:
                    self.trouble(changed)
            case effects.Freeze(push):
                norm = self._fragments[push.fragment].freeze(push.wire_dtype)
                for change in self._constants.warnings():
                    self.trouble(change)
                if isinstance(norm, effects.NonFinite):
                    return norm
                return effects.Frozen(replace(push, norm=norm), self.link.reconnections)
            case effects.KeepAnchor(fragment):
                self._fragments[fragment].keep_anchor()
            case effects.Land(fragment, landing, step):
                values = self._fragments[fragment]
                try:
                    values.land(landing, step)
                except Exception as error:  # noqa: BLE001 - the boundary tells of it
                    return effects.Failed(error, values.is_torn)
                except BaseException:
                    # Ctrl-C while it was still being worked out: the model is what it was.
                    if not values.has_begun(landing):
                        self.state.fragments[fragment].has_not_begun()
                    raise
            case _:
                raise TypeError(f"not an effect of a boundary: {effect!r}")
        return None

    def _look(self) -> Sight:
        news = self.link.take_news() if self._has_news else NO_NEWS
        self._shown = self._link_state()
        return Sight(news, self._shown, self.reports.totals)

    def _wait(self, seconds: float) -> None:
        with self.termination.waiting():
            self.link.wait_for(lambda: self._has_news or self._link_state() != self._shown, seconds)

    @property
    def _has_news(self) -> bool:
        return self.link.has_news or bool(self.link.turns)

    def _link_state(self) -> LinkState:
        return self.link.described(self.termination.reason)


def _take(link: Link, fragment: int) -> Arrival:
    arrival = link.take(fragment)
    assert arrival is not None
    return arrival


# What drives workers of a run inside this process, by the broker's address; see `testing`.
DRIVERS: dict[str, Callable[..., Driver]] = {}
