"""What the training thread knows: all fragments, whose turn it is, and how the link stands."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from diloco_protocol import Code
from diloco_protocol.messages import Released
from diloco_worker.core.compatibility import sync_every
from diloco_worker.core.effects import Carried, Granted, Joined
from diloco_worker.core.sync.effects import Answer, Sight
from diloco_worker.core.sync.flights import MergeRule
from diloco_worker.core.sync.fragment import Fragment, TrainingBase
from diloco_worker.core.sync.news import LinkState, News
from diloco_worker.core.sync.patience import Options
from diloco_worker.core.sync.schedule import RoundSchedule
from diloco_worker.core.sync.work import Totals, WorkCounter


class SyncState:
    """See the head of this module.

    Args:
        chunks: of each fragment.
        bases: of each fragment, what training stands on.
        totals: what was reported so far.
        cycle_start: the optimizer step after which the cycle of slots began.

    Attributes:
        step: the optimizer step that has been taken last.
        link: how it stood at the latest look.
        options: what is this worker's own.
        merge: how replies come into the model, and when.
        fragments: in order.
        schedule: whose turn it is.
        work: what was done since each fragment's last freeze.
    """

    def __init__(
        self,
        link: LinkState,
        options: Options,
        *,
        chunks: Sequence[int],
        bases: Sequence[TrainingBase],
        totals: Totals,
        step: int,
        cycle_start: int,
    ) -> None:
        config = link.config
        self.step = step
        self.link = link
        self.options = options
        self.merge = MergeRule.of(config)
        self.fragments = [
            Fragment(number, size, base)
            for number, (size, base) in enumerate(zip(chunks, bases, strict=True))
        ]
        self.work = WorkCounter(step, totals, [base.work for base in bases])
        self.schedule = RoundSchedule(
            self._sync_every(),
            config.num_fragments,
            common=config.mode == "sync",
            step=step,
            cycle_start=cycle_start,
        )

    @property
    def is_torn(self) -> bool:
        """A merge was broken off: a part of the model is ahead of the rest."""
        return any(fragment.is_torn for fragment in self.fragments)

    @property
    def unsynced_steps(self) -> int:
        """Steps past a boundary that are not synchronised; of the fragment that has most."""
        flights = [(f.flight, f.is_torn) for f in self.fragments if f.flight is not None]
        stuck = [f.steps + self.step - f.began for f, is_torn in flights if is_torn or f.let_go]
        if self.schedule.is_due(self.step):
            stuck.append(self.work.since(self.schedule.fragment, self.step).steps)
        return max(stuck, default=0)

    def bases(self, totals: Totals) -> list[TrainingBase]:
        """What training of each fragment stands on.

        Args:
            totals: what was reported up to now.
        """
        self.work.totals = totals
        return [f.base(self.work.since(f.number, self.step)) for f in self.fragments]

    def by_age(self) -> list[Fragment]:
        """The fragments in flight, the oldest flight first."""
        flying = [(f.flight.began, f.number) for f in self.fragments if f.flight is not None]
        return [self.fragments[number] for _, number in sorted(flying)]

    def set_pace(self) -> None:
        """Use the H that is in force now, as soon as the schedule can."""
        self.schedule.pace(self._sync_every(), self.step)

    def _sync_every(self) -> int:
        worked_out = None if self.options.dylu is False else self.link.sync_every
        return sync_every(self.link.config, self.options.sync_every, worked_out)

    def take_in(self, sight: Answer) -> News:
        """Take in what has come; the model stays as it is."""
        assert isinstance(sight, Sight)
        self.link, self.work.totals, news = sight.link, sight.totals, sight.news
        if not news:
            return news
        for number, arrival in news.arrivals.items():
            if number < len(self.fragments):
                self.fragments[number].take_in(arrival)
        for fragment in self.fragments:
            flight = fragment.flight
            if flight is not None and flight.push_id in news.rejections:
                fragment.rejection = news.rejections[flight.push_id]
        over = [f for f in self.fragments if f.is_over and f.number in self.schedule.rounds]
        self._turn(news, {fragment.number for fragment in over})
        for fragment in over:
            reply, rejection = fragment.reply, fragment.rejection
            if reply is not None and not reply.superseding:
                self.schedule.landed(fragment.number)
            else:
                is_late = rejection is not None and rejection.code == Code.LATE
                self.schedule.dropped(fragment.number, too_late=is_late)
        return news

    def _turn(self, news: News, over: Collection[int]) -> None:
        """Tell the schedule what concerns rounds; `over` are fragments whose flight has ended."""
        schedule = self.schedule
        for event in news.turns:
            match event:
                case Joined(welcome):
                    schedule.welcomed(welcome.first_round, over)
                case Granted(push_id, number, standing, round_):
                    flight = self.fragments[number].flight
                    if flight is not None and flight.push_id == push_id:
                        schedule.granted(number, standing, round_)
                case Carried(number, round_):
                    schedule.carried(number, round_)
                case Released(averaged=averaged, round=round_):
                    if averaged:  # the first version of a broker was made in no round
                        schedule.made(round_)
