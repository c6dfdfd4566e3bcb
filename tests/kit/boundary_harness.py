"""A training thread under test: the boundary, a fake clock, and a link that says what it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from diloco_protocol import Bitmap, Counted, Ledger, RunConfig, VersionId
from diloco_protocol.messages import Grant, Notice, Push, Released, Standing, Welcome
from diloco_worker.session.events import Event
from diloco_worker.session.news import Arrival, LinkState, News, Rejection, Sight, Work
from diloco_worker.sync import boundary, effects
from diloco_worker.sync.effects import Answer, Effect, Steps
from diloco_worker.sync.fragment import TrainingBase
from diloco_worker.sync.landings import look
from diloco_worker.sync.metrics import SyncMetrics
from diloco_worker.sync.patience import Options
from diloco_worker.sync.state import SyncState

RUN = "0123456789abcdef"
E = TypeVar("E", bound="Effect | Event")


def version(counter: int) -> VersionId:
    return VersionId(RUN, counter, counter)


@dataclass
class Trainer:
    """See the head of this module.

    Attributes:
        link: how it stands; `changes` changes it.
        metrics: what was counted.
        done: effects, the oldest first; `forget` empties it.
        interrupts: raised instead of carrying out an effect of this type, once.
        fails: what the next `Land` answers.
        bad: what the next `Freeze` answers.
    """

    config: RunConfig
    options: Options = field(default_factory=Options)
    now: float = 100.0
    totals: Work = field(default_factory=Work)
    step: int = 0
    done: list[Effect | Event] = field(default_factory=list)
    interrupts: type[Effect | Event] | None = None
    fails: effects.Failed | None = None
    bad: effects.NonFinite | None = None
    norm: float | None = 1.0  # of what is frozen
    metrics: SyncMetrics = field(default_factory=SyncMetrics)

    def __post_init__(self) -> None:
        self.link = LinkState(self.config)
        self._turns: list[Any] = []
        self._arrivals: dict[int, Arrival] = {}
        self._rejections: dict[int, Rejection] = {}
        self._steps: Steps[Any] | None = None
        self._to_do: list[Callable[[SyncState], Steps[Any]]] = []
        self._ids = 0
        self._is_waiting = False
        self.result: Any = None

    def begins(self, *bases: TrainingBase, cycle_start: int = 0) -> Trainer:
        """Training begins on these bases, by default on version 0 of everything."""
        number = self.config.num_fragments
        self.state = SyncState(
            worker_id="me",
            link=self.link,
            options=self.options,
            chunks=[2] * number,
            bases=bases or [TrainingBase(version(0), Ledger())] * number,
            totals=self.totals,
            step=self.step,
            cycle_start=cycle_start,
            metrics=self.metrics,
            clock=lambda: self.now,
            draw=self._draw,
        )
        if not bases:
            self.is_welcome()
            self.does(look)
        return self

    def _draw(self) -> int:
        self._ids += 1
        return self._ids

    # What happens.

    def does(self, *what: Callable[[SyncState], Steps[Any]]) -> Trainer:
        """Do one after the other, until all is done or it waits."""
        assert not self._is_waiting, "it stands still"
        self._to_do += what
        self._go_on(None)
        return self

    def steps(self, number: int) -> Trainer:
        """Take optimizer steps, until it waits."""
        for _ in range(number):
            if not self._is_waiting:
                self.step += 1
                self.does(lambda state: boundary.after_step(state, self.step))
        return self

    def wakes(self) -> Trainer:
        """Something has come, or time has passed."""
        if self._is_waiting:
            self._is_waiting = False
            self._go_on(self._sight())
        return self

    def passes(self, seconds: float) -> Trainer:
        self.now += seconds
        return self.wakes()

    def changes(self, **link: Any) -> Trainer:
        """The link stands otherwise from now on."""
        self.link = replace(self.link, **link)
        return self.wakes()

    def is_welcome(self, first_round: int = 0) -> Trainer:
        welcome = Welcome(b"s" * 16, "epoch", self.config, first_round, RUN, ())
        self._turns = [welcome]
        return self.wakes()

    def is_granted(self, push: Push, round_: int, standing: Standing = Standing.NEW) -> Trainer:
        """The broker takes it for this round."""
        self._turns.append(Grant(push.push_id, push.fragment, standing, round=round_))
        return self.wakes()

    def is_put_off(self, push: Push, round_: int) -> Trainer:
        """The broker takes nothing of it before this round."""
        return self.is_granted(push, round_, Standing.WAIT)

    def is_carried(self, fragment: int, round_: int) -> Trainer:
        """The round has closed without its push, which goes into this one."""
        self._turns.append(Notice("carried", fragment=fragment, round=round_))
        return self.wakes()

    def receives(
        self, counter: int, *, fragment: int = 0, counted: Push | None = None, **more: Any
    ) -> Trainer:
        """A version is here, whole; in it is this push."""
        ids = () if counted is None else (Counted(counted.push_id),)
        ledger = Ledger({"me": ids} if ids else {})
        released = Released(fragment, version(counter), ledger, averaged=1, round=counter - 1)
        pushes = frozenset(each.push_id for each in ids)
        self._arrivals[fragment] = Arrival(released, pushes, "values", **more)
        self._turns.append(released)
        return self.wakes()

    def is_refused(
        self, push: Push, code: str, text: str = "No.", *, counted: Bitmap | None = None
    ) -> Trainer:
        """`counted`: the chunks of it that may count all the same; None: the broker has not said."""
        self._rejections[push.push_id] = Rejection(code, text, counted)
        return self.wakes()

    # What came of it.

    def waits(self) -> bool:
        """Whether it stands still."""
        return self._is_waiting

    def all(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.done if isinstance(effect, kind)]

    def forget(self) -> None:
        self.done.clear()

    @property
    def kinds(self) -> list[str]:
        """What was done, without looks."""
        return [type(e).__name__ for e in self.done if not isinstance(e, effects.Look)]

    @property
    def pushes(self) -> list[Push]:
        return [offer.flight.push for offer in self.all(effects.Offer)]

    @property
    def outcomes(self) -> list[str]:
        """How the model was changed."""
        return [land.landing.outcome.value for land in self.all(effects.Land)]

    @property
    def said(self) -> str:
        told = [e for e in self.done if isinstance(e, effects.Say | effects.Trouble)]
        return "\n".join(each.text for each in told)

    # Carrying out.

    def _go_on(self, answer: Answer) -> None:
        while self._steps is not None or self._to_do:
            if self._steps is None:
                self._steps, answer = self._to_do.pop(0)(self.state), None
            try:
                effect = self._steps.send(answer)
            except StopIteration as end:
                self._steps, self.result = None, end.value
                continue
            self.state.schedule.check_invariants()
            if self.interrupts is not None and isinstance(effect, self.interrupts):
                self.interrupts = self._steps = None
                self._to_do.clear()
                return
            self.done.append(effect)
            if isinstance(effect, effects.Wait):
                self._is_waiting = True
                return
            answer = self._answer(effect)

    def _answer(self, effect: Effect | Event) -> Answer:
        match effect:
            case effects.Look():
                return self._sight()
            case effects.ReadReports():
                return self.totals
            case effects.Freeze(push):
                bad, self.bad = self.bad, None
                return bad or effects.Frozen(replace(push, norm=self.norm), self.link.reconnections)
            case effects.Land():
                failed, self.fails = self.fails, None
                return failed
        return None

    def _sight(self) -> Sight:
        news = News(tuple(self._turns), self._arrivals, self._rejections)
        self._turns, self._arrivals, self._rejections = [], {}, {}
        return Sight(news, self.link, self.totals)
