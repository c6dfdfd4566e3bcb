"""Carries out for the hook what `core.sync.boundary` decides, on the model, the link and the log.

Belongs to the training thread. An exception or Ctrl-C in the middle of an effect drops the rest; what
was decided and not done is done behind the next step.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

from diloco_protocol.chunks import FragmentLayout
from diloco_worker.core import events
from diloco_worker.core.downloads import Held
from diloco_worker.core.sync import boundary, effects
from diloco_worker.core.sync.effects import Answer, Effect, Steps
from diloco_worker.core.sync.fragment import MergeRule, TrainingBase
from diloco_worker.core.sync.landings import look
from diloco_worker.core.sync.metrics import SyncMetrics
from diloco_worker.core.sync.news import Arrival, LinkState, News, Sight, Work
from diloco_worker.core.sync.patience import Options
from diloco_worker.core.sync.resumption import resume
from diloco_worker.core.sync.schedule import RoundSchedule
from diloco_worker.core.sync.state import SyncState
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.values import Constants
from diloco_worker.shell.link import Link
from diloco_worker.training.fragment_sync import FragmentSync
from diloco_worker.training.push_log import PushLog
from diloco_worker.training.reports import Reports
from diloco_worker.training.resumption import Resumption, SavedFragment
from diloco_worker.training.settings import Settings

logger = logging.getLogger("diloco.worker")

NO_NEWS = News()
T = TypeVar("T")


class Driver:
    """See the head of this module. The layout's fragments have all arrived at the link.

    Args:
        metrics: what happens is counted in them.
        publish: tells the next heartbeat how training stands, and whether it stands still.
        audit: is told of each push that begins and ends.
        why_stop: why the process is about to end, so that nothing is waited for; None while it is not.
        waiting: a context in which Ctrl-C comes at once.
        clock: seconds, monotonic.
        step, cycle_start: optimizer steps so far, and those when the cycle of slots began.
        resumption: what to go on from, where the model is as it was then.

    Attributes:
        state: what the boundary decides by.
    """

    def __init__(  # noqa: PLR0913  it joins all parts of a worker
        self,
        worker_id: str,
        tensors: ModelTensors,
        link: Link,
        *,
        settings: Settings,
        reports: Reports,
        metrics: SyncMetrics,
        publish: Callable[[bool], None],
        audit: PushLog,
        why_stop: Callable[[], str | None],
        waiting: Callable[[], AbstractContextManager[None]],
        clock: Callable[[], float],
        step: int,
        cycle_start: int,
        resumption: Resumption | None = None,
    ) -> None:
        config, layout = link.config, link.layout
        assert config is not None and layout is not None
        self._link = link
        self._reports = reports
        self._publish = publish
        self._audit = audit
        self._why_stop = why_stop
        self._waiting = waiting
        self._clock = clock
        self._frozen = _take_frozen(link, layout.frozen, tensors)
        arrivals = [_take(link, part.fragment) for part in layout.fragments]
        if resumption is not None:
            saved = resumption.fragments
        else:
            for arrival in arrivals:
                tensors.put(arrival.values)
            saved = tuple(
                SavedFragment(TrainingBase(each.version, each.released.ledger), each.values)
                for each in arrivals
            )
        merge = MergeRule.of(config)
        self._fragments = [
            FragmentSync(
                part, tensors, merge, base=each.values, delta=each.delta, set_base=link.set_base
            )
            for part, each in zip(layout.fragments, saved, strict=True)
        ]
        self._shown = self._link_state()  # what the boundary knows of
        self.state = SyncState(
            worker_id=worker_id,
            link=self._shown,
            options=Options(
                sync_every=settings.sync_every,
                dylu=settings.dylu,
                wire_dtype=settings.wire_dtype,
                heartbeat_interval=settings.heartbeat_interval,
                max_sync_retries=settings.max_sync_retries,
                timeout=settings.timeout,
            ),
            chunks=[part.chunks for part in layout.fragments],
            bases=[each.base for each in saved],
            totals=self._totals(),
            step=step,
            cycle_start=cycle_start,
            metrics=metrics,
            clock=clock,
            draw=lambda: secrets.randbits(64),
        )
        self._constants = Constants(tensors)
        self._watch = tensors.watch
        if resumption is None:
            self._carry_out(look(self.state))
        else:
            self._carry_out(resume(self.state, resumption.place, cycle_start, arrivals))

    @property
    def schedule(self) -> RoundSchedule:
        return self.state.schedule

    @property
    def step(self) -> int:
        """The optimizer step that has been taken last."""
        return self.state.step

    @step.setter
    def step(self, step: int) -> None:
        self.state.step = step

    @property
    def position(self) -> int:
        """Steps in the cycle at hand."""
        return self.schedule.position(self.step)

    @property
    def unsynced_steps(self) -> int:
        """Steps past a boundary that are not synchronised; of the fragment that has most."""
        return self.state.unsynced_steps

    @property
    def is_torn(self) -> bool:
        """A merge is broken off: a part of the model is ahead of the rest."""
        return self.state.is_torn

    def resumption(self, worker_id: str, checksums: Mapping[str, tuple[int, ...]]) -> Resumption:
        """What another life of this worker goes on from, while no merge is broken off; shares memory
        with this one.

        Args:
            checksums: of the model as it is now.
        """
        state, terms = self.state, self._link.terms
        assert terms is not None and not state.is_torn
        saved = (
            SavedFragment(base, each.base, None if base.flight is None else each.delta)
            for base, each in zip(
                state.training_bases(self._totals()), self._fragments, strict=True
            )
        )
        return Resumption(
            worker_id=worker_id,
            terms=terms,
            place=state.schedule.place,
            frozen=self._frozen,
            fragments=tuple(saved),
            checksums=checksums,
        )

    # What the hook calls.

    def after_step(self, step: int) -> None:
        """An optimizer step has been taken. Returns when training may go on."""
        self._reports.read(self._clock())
        self._carry_out(boundary.after_step(self.state, step))

    def force(self) -> bool:
        """Take the next P turns now. Returns whether all of their deltas are in a version."""
        return self._carry_out(boundary.force(self.state))

    def load(self) -> bool:
        """Put the newest version of every fragment into the model; False when they do not come."""
        return self._carry_out(boundary.load(self.state))

    def leave(self, *, hasty: bool = False) -> None:
        """Wait for what is in flight, as `boundary.leave` says. The model stays as it is."""
        self._carry_out(boundary.leave(self.state, hasty=hasty))

    def restart(self) -> None:
        """The next slot is a whole distance away."""
        self.schedule.restart(self.step)

    def trouble(self, text: str) -> None:
        """Something went wrong: for the log, and for `last_error`."""
        logger.warning("%s", text)
        self._link.last_error = text

    # Effects.

    def _carry_out(self, steps: Steps[T]) -> T:
        answer: Answer = None
        while True:
            try:
                effect = steps.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            answer = self._do(effect)

    def _do(self, effect: Effect | events.Event) -> Answer:  # noqa: C901, PLR0912  a case for each effect
        link = self._link
        match effect:
            case effects.Look():
                return self._look()
            case effects.Wait(seconds):
                self._wait(seconds)
                return self._look()
            case effects.StandStill():
                self._publish(True)
            case effects.ReadReports():
                self._reports.read(self._clock(), at_once=True)
                return self._totals()
            case events.BeatNow():
                self._publish(False)
                link.tell(effect)
            case effects.Offer(flight, is_new):
                if is_new:
                    self._audit.frozen(flight)
                delta = self._fragments[flight.push.fragment].delta
                assert delta is not None
                link.offer(flight.push, delta.wire)
            case events.Event():
                link.tell(effect)
            case effects.PushEnded(push_id, fragment, version, why):
                if version is not None:
                    self._audit.counted(push_id, fragment, version)
                else:
                    self._audit.dropped(push_id, fragment, why)
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
                changed = self._watch.look() if self._watch is not None else None
                if changed is not None:
                    self.trouble(changed)
            case effects.Freeze(push):
                norm = self._fragments[push.fragment].freeze(push.wire_dtype)
                for change in self._constants.warnings():
                    self.trouble(change)
                if isinstance(norm, effects.NonFinite):
                    return norm
                return effects.Frozen(replace(push, norm=norm), self._link.reconnections)
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
                        self.state.fragments[fragment].landing = None
                    raise
            case _:
                raise TypeError(f"not an effect of a boundary: {effect!r}")
        return None

    def _look(self) -> Sight:
        news = self._link.take_news() if self._has_news else NO_NEWS
        self._shown = self._link_state()
        return Sight(news, self._shown, self._totals())

    def _wait(self, seconds: float) -> None:
        with self._waiting():
            self._link.wait_for(
                lambda: self._has_news or self._link_state() != self._shown, seconds
            )

    @property
    def _has_news(self) -> bool:
        return self._link.has_news or bool(self._link.turns)

    def _link_state(self) -> LinkState:
        link = self._link
        return link.state(
            silence=link.silence(),
            asked_to_stop=self._why_stop(),
            address=link.address,
            description=link.describe(),
        )

    def _totals(self) -> Work:
        return Work(0, self._reports.tokens, self._reports.samples, self._reports.loss)


def _take_frozen(link: Link, part: FragmentLayout, tensors: ModelTensors) -> Held | None:
    """Put the frozen parameters into the model, which keeps the only copy; returns their version."""
    if not part.chunks:
        return None
    arrival = _take(link, part.fragment)
    if arrival.values is not None:  # the script has loaded them otherwise
        tensors.put(arrival.values)
    link.set_base(part.fragment, None)
    return Held(arrival.version, arrival.released.ledger)


def _take(link: Link, fragment: int) -> Arrival:
    arrival = link.take(fragment)
    assert arrival is not None
    return arrival
