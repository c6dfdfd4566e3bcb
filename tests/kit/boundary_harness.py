"""A training thread under test: the boundary, a fake clock, and a link that says what it is told."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field, replace
from types import coroutine
from typing import Any, TypeVar

from diloco_protocol import Bitmap, Counted, Ledger, RunConfig, VersionId
from diloco_protocol.messages import Grant, Notice, Push, Released, Standing, Welcome
from diloco_worker.session.events import BeatNow, Event
from diloco_worker.session.news import Arrival, LinkState, News, Poll, Rejection, Work
from diloco_worker.sync import boundary
from diloco_worker.sync.fragment import InFlight, Merge, TrainingBase
from diloco_worker.sync.metrics import SyncMetrics
from diloco_worker.sync.ports import MergeFailed, NonFinite
from diloco_worker.sync.state import Options, SyncState

RUN = "0123456789abcdef"
E = TypeVar("E", bound=Event)
Asked = Callable[[SyncState], Coroutine[Any, Any, Any]]


@coroutine
def _suspended() -> Generator[None, None, None]:
    yield


@dataclass(frozen=True)
class Offered:
    """A delta that was handed to the link."""

    push: Push
    is_new: bool


@dataclass(frozen=True)
class Ended:
    """A push that was written down as ended."""

    push_id: int
    version: VersionId | None
    why: str


def version(counter: int) -> VersionId:
    return VersionId(RUN, counter, counter)


@dataclass
class Trainer:
    """The ports of a boundary, which it runs until it waits.

    Attributes:
        link: how it stands; `changes` changes it.
        metrics: the counters.
        calls: names of the ports that were called, polls aside, and of events for the session.
        interrupts: the port in whose next call Ctrl-C comes.
        fails: what the next merge fails with, before it has touched the model.
        bad: what the next freeze finds.
    """

    config: RunConfig
    options: Options = field(default_factory=Options)
    now: float = 100.0
    totals: Work = field(default_factory=Work)
    step: int = 0
    calls: list[str] = field(default_factory=list)
    polls: int = 0
    events: list[Event] = field(default_factory=list)  # for the session
    offered: list[Offered] = field(default_factory=list)
    merged: list[Merge] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)  # seconds of each wait, at most
    lines: list[str] = field(default_factory=list)  # of the log
    interrupts: str | None = None
    fails: Exception | None = None
    bad: NonFinite | None = None
    norm: float | None = 1.0  # of what is frozen
    metrics: SyncMetrics = field(default_factory=SyncMetrics)

    def __post_init__(self) -> None:
        self.link = LinkState(self.config)
        self._turns: list[Any] = []
        self._arrivals: dict[int, Arrival] = {}
        self._rejections: dict[int, Rejection] = {}
        self._boundary: Coroutine[Any, Any, Any] | None = None
        self._to_do: list[Asked] = []
        self._ids = 0
        self._is_waiting = False
        self.result: Any = None

    def begins(self, *bases: TrainingBase, cycle_start: int = 0) -> Trainer:
        """Training begins on these bases, by default on version 0 of everything."""
        number = self.config.num_fragments
        self.state = SyncState(
            worker_id="me",
            ports=self,
            link=self.link,
            options=self.options,
            chunks=[2] * number,
            bases=bases or [TrainingBase(version(0), Ledger())] * number,
            totals=self.totals,
            step=self.step,
            cycle_start=cycle_start,
            metrics=self.metrics,
        )
        if not bases:
            self.is_welcome()
            self.does(boundary.poll)
        return self

    def clock(self) -> float:
        return self.now

    def draw(self) -> int:
        self._ids += 1
        return self._ids

    # What happens.

    def does(self, *what: Asked) -> Trainer:
        """Do one after the other, until all is done or it waits."""
        assert not self._is_waiting, "it stands still"
        self._to_do += what
        self._go_on()
        return self

    def steps(self, number: int) -> Trainer:
        """Take optimizer steps, until it waits."""
        for _ in range(number):
            if not self._is_waiting:
                self.step += 1
                self.does(lambda state: boundary.after_step(state, self.step))
        return self

    def wakes(self) -> Trainer:
        """A message was received, or time has passed."""
        if self._is_waiting:
            self._is_waiting = False
            self._go_on()
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
        return self.is_granted(push, round_, Standing.WAIT)

    def is_deferred(self, fragment: int, round_: int) -> Trainer:
        """The round has closed without its push, which goes into this one."""
        self._turns.append(Notice("deferred", fragment=fragment, round=round_))
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
        return self._is_waiting

    def all(self, kind: type[E]) -> list[E]:
        """The events of this kind that the session was handed."""
        return [event for event in self.events if isinstance(event, kind)]

    def forget(self) -> None:
        for what in (self.calls, self.events, self.offered, self.merged, self.ended, self.lines):
            what.clear()

    @property
    def pushes(self) -> list[Push]:
        return [each.push for each in self.offered]

    @property
    def outcomes(self) -> list[str]:
        return [merge.outcome.value for merge in self.merged]

    @property
    def said(self) -> str:
        return "\n".join(self.lines)

    def _go_on(self) -> None:
        while self._boundary is not None or self._to_do:
            if self._boundary is None:
                self._boundary = self._to_do.pop(0)(self.state)
            try:
                self._boundary.send(None)
            except StopIteration as end:
                self._boundary, self.result = None, end.value
            except KeyboardInterrupt:
                self._boundary = None
                self._to_do.clear()
            if self._is_waiting:
                return

    # The ports.

    def _called(self, name: str) -> None:
        self.state.schedule.check_invariants()
        if self.interrupts == name:
            self.interrupts = None
            raise KeyboardInterrupt
        self.calls.append(name)

    def has_news(self) -> bool:
        return bool(self._turns or self._arrivals or self._rejections)

    def poll(self) -> Poll:
        self.polls += 1
        news = News(tuple(self._turns), self._arrivals, self._rejections)
        self._turns, self._arrivals, self._rejections = [], {}, {}
        return Poll(news, self.link, self.totals)

    async def wait(self, seconds: float) -> Poll:
        self._called("wait")
        self.waited.append(seconds)
        self._is_waiting = True
        await _suspended()
        return self.poll()

    def notify(self, event: Event) -> None:
        self._called(type(event).__name__)
        self.events.append(event)

    def offer(self, in_flight: InFlight, *, is_new: bool) -> int:
        self._called("offer")
        self.offered.append(Offered(in_flight.push, is_new))
        return self.link.reconnections

    def check_model(self) -> None:
        self._called("check_model")

    async def freeze(self, push: Push) -> Push | NonFinite:
        self._called("freeze")
        bad, self.bad = self.bad, None
        return bad or replace(push, norm=self.norm)

    def keep_anchor(self, fragment: int) -> None:
        self._called("keep_anchor")

    async def merge(self, fragment: int, merge: Merge, step: int) -> None:
        self._called("merge")
        self.merged.append(merge)
        failed, self.fails = self.fails, None
        if failed is not None:
            raise MergeFailed from failed

    def read_reports(self) -> Work:
        self._called("read_reports")
        return self.totals

    def show_waiting(self) -> None:
        self._called("show_waiting")

    def beat(self) -> None:
        self._called("beat")
        self.events.append(BeatNow())

    def log(self, text: str, *, is_warning: bool = False) -> None:
        self._called("log")
        self.lines.append(text)

    def trouble(self, text: str, cause: BaseException | None = None) -> None:
        self._called("trouble")
        self.lines.append(text)

    def push_ended(
        self, push_id: int, fragment: int, version: VersionId | None = None, why: str = ""
    ) -> None:
        self._called("push_ended")
        self.ended.append(Ended(push_id, version, why))


H = 4


def trainer(options: Options | None = None, **changes: Any) -> Trainer:
    """It trains in a synchronous run with this H, unless the changes say otherwise."""
    return Trainer(a_run(**changes), options or Options()).begins()


def a_run(**changes: Any) -> RunConfig:
    return RunConfig(**{"mode": "sync", "sync_every": H, **changes})
