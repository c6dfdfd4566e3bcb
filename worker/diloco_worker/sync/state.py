"""The state of the training thread: all fragments, the schedule, and the state of the link."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import InitVar, dataclass, field, replace

from diloco_protocol import Code
from diloco_protocol.messages import Grant, Notice, Released, Welcome
from diloco_worker.session.compatibility import sync_every
from diloco_worker.session.news import LinkState, News, Poll, Work
from diloco_worker.sync.fragment import Fragment, TrainingBase
from diloco_worker.sync.metrics import SyncLines, SyncMetrics
from diloco_worker.sync.ports import Ports
from diloco_worker.sync.schedule import RoundSchedule

# Seconds between two log lines about the same wait.
LOG_INTERVAL_S = 30.0
# Seconds that a terminating process waits for its pushes to be sent.
HASTY_S = 4.0


@dataclass(frozen=True)
class Options:
    """Settings of a worker that the boundary reads; see `DiLoCoWorker` for each."""

    sync_every: int | None = None
    dylu: bool | None = None
    wire_dtype: str | None = None
    heartbeat_interval: float | None = None
    max_sync_retries: int = 3
    timeout: float = 600.0


@dataclass(frozen=True)
class Leaving:
    """The time limit for pushes in flight."""

    until: float
    limit: float  # seconds in all
    hasty: bool  # wait only until the chunks are uploaded


class Patience:
    """One wait. The first log line is due after `first` seconds, the others every `LOG_INTERVAL_S`."""

    def __init__(self, clock: Callable[[], float], first: float = LOG_INTERVAL_S) -> None:
        self._clock = clock
        self._say_at = clock() + first

    def pause(self, at_most: float = LOG_INTERVAL_S) -> float:
        """Seconds to sleep until the next log line is due."""
        return max(0.0, min(at_most, self._say_at - self._clock()))

    def is_due(self) -> bool:
        """Whether a log line is due; schedules the next one."""
        is_due = self._clock() >= self._say_at
        if is_due:
            self._say_at = self._clock() + LOG_INTERVAL_S
        return is_due


@dataclass(kw_only=True)
class SyncState:
    """All state of the boundaries. Belongs to the training thread."""

    worker_id: str
    ports: Ports
    link: LinkState  # at the latest poll
    options: Options
    chunks: InitVar[Sequence[int]]  # of each fragment
    bases: InitVar[Sequence[TrainingBase]]  # of each fragment
    totals: Work  # reported by the script up to the latest poll; without steps
    step: int  # the last optimizer step
    cycle_start: InitVar[int]  # the optimizer step after which the cycle of slots began
    metrics: SyncMetrics
    fragments: list[Fragment] = field(init=False)  # in order
    schedule: RoundSchedule = field(init=False)
    lines: SyncLines = field(init=False)
    leaving: Leaving | None = None  # how long to wait at the end of training; None before
    has_warned_of_weights: bool = False
    has_warned_of_zeros: bool = False  # and no fragment has moved since

    def __post_init__(
        self, chunks: Sequence[int], bases: Sequence[TrainingBase], cycle_start: int
    ) -> None:
        config, done = self.link.config, self.done
        self.fragments = [
            Fragment(number, self.worker_id, size, base, done.since(base.work))
            for number, (size, base) in enumerate(zip(chunks, bases, strict=True))
        ]
        self.schedule = RoundSchedule(
            self._sync_every(),
            config.num_fragments,
            common=config.mode == "sync",
            step=self.step,
            cycle_start=cycle_start,
        )
        self.lines = SyncLines(
            self.ports.clock,
            self.metrics.seconds_waited,
            has_rounds=self.schedule.common,
            has_fragments=len(self.fragments) > 1,
        )

    @property
    def is_calm(self) -> bool:
        """Whether there is nothing to do after this step, unless something arrived."""
        if self.schedule.is_due(self.step) or (self.lines.unsaid and self.lines.due_in <= 0):
            return False
        return all(fragment.is_calm(self.step) for fragment in self.fragments)

    @property
    def is_partial(self) -> bool:
        """A merge was interrupted: a part of the model is ahead of the rest."""
        return any(fragment.is_partial for fragment in self.fragments)

    @property
    def unsynced_steps(self) -> int:
        """Steps past a boundary that are not synchronised; of the fragment that has most."""
        pushes_in_flight = [
            (f.in_flight, f.is_partial) for f in self.fragments if f.in_flight is not None
        ]
        stuck = [
            f.steps + self.step - f.began
            for f, is_partial in pushes_in_flight
            if is_partial or f.is_detached
        ]
        if self.schedule.is_due(self.step):
            stuck.append(self.work(self.fragments[self.schedule.fragment]).steps)
        return max(stuck, default=0)

    @property
    def done(self) -> Work:
        """All work so far."""
        return replace(self.totals, steps=self.step)

    def work(self, fragment: Fragment) -> Work:
        """The work since the fragment's last freeze, and the latest loss."""
        return self.done.since(fragment.done_before)

    def restart_work(self, fragment: Fragment) -> None:
        """Count its work from here."""
        fragment.done_before = self.done

    def training_bases(self, totals: Work) -> list[TrainingBase]:
        """The training state of each fragment, as far as it is in the model."""
        self.totals = totals
        return [
            TrainingBase(f.version, f.ledger, self.work(f), f.in_flight or f.parting, f.dropped)
            for f in self.fragments
        ]

    def by_age(self) -> list[Fragment]:
        """The fragments in flight, the oldest push first."""
        flying = [(f.in_flight.began, f.number) for f in self.fragments if f.in_flight is not None]
        return [self.fragments[number] for _, number in sorted(flying)]

    def set_pace(self) -> None:
        """Use the current H as soon as the schedule can."""
        self.schedule.pace(self._sync_every(), self.step)

    def _sync_every(self) -> int:
        worked_out = None if self.options.dylu is False else self.link.sync_every
        return sync_every(self.link.config, self.options.sync_every, worked_out)

    def take_in(self, found: Poll) -> News:
        """Take in arrivals; the model stays as it is."""
        self.link, self.totals, news = found.link, found.totals, found.news
        if not news:
            return news
        for number, arrival in news.arrivals.items():
            if number < len(self.fragments):
                self.fragments[number].take_in(arrival)
        for fragment in self.fragments:
            in_flight = fragment.in_flight
            if in_flight is not None and in_flight.push_id in news.rejections:
                fragment.rejection = news.rejections[in_flight.push_id]
        over = [f for f in self.fragments if f.is_over and f.number in self.schedule.rounds]
        self._turn(news, {fragment.number for fragment in over})
        for fragment in over:
            reply, rejection = fragment.reply, fragment.rejection
            if reply is not None and not reply.superseding:
                self.schedule.merged(fragment.number)
            else:
                is_late = rejection is not None and rejection.code == Code.LATE
                self.schedule.dropped(fragment.number, too_late=is_late)
        return news

    def _turn(self, news: News, over: Collection[int]) -> None:
        """Notify the schedule about rounds; `over`: fragments whose push has ended."""
        schedule = self.schedule
        for event in news.turns:
            match event:
                case Welcome(first_round=first_round):
                    schedule.welcomed(first_round, over)
                case Grant(push_id, number, standing, round=round_):
                    in_flight = self.fragments[number].in_flight
                    if in_flight is not None and in_flight.push_id == push_id:
                        schedule.granted(number, standing, round_)
                case Notice(fragment=number, round=round_):
                    schedule.deferred(number, round_)
                case Released(averaged=averaged, round=round_):
                    if averaged:  # the first version of a broker was made in no round
                        schedule.made(round_)
