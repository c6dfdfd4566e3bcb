"""What happens after each optimizer step: freezing, waiting and merging, over all fragments.

Between its slot and its apply point a fragment costs the training thread nothing: the link sends and
receives meanwhile. At the slot the delta is copied, subtracted and encoded; at the apply point the
reply is copied into the model. `turns` says whose turn it is and who may be waited for, `exchange` what
becomes of one fragment. Belongs to the training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from diloco_protocol import Code, ModelLayout, RunConfig
from diloco_worker.env import Settings
from diloco_worker.events import Carried, Granted, Joined
from diloco_worker.exchange import FragmentExchange, Merge, NonFinite, Outcome, Work
from diloco_worker.link import Link
from diloco_worker.metrics import SyncMetrics
from diloco_worker.news import News
from diloco_worker.patience import Patience
from diloco_worker.reports import Reports
from diloco_worker.session import Phase
from diloco_worker.snapshot import ModelTensors
from diloco_worker.turns import Turn, Turns

logger = logging.getLogger("diloco.worker")


@dataclass
class Mark:
    """The totals at a fragment's last freeze."""

    step: int
    tokens: int
    samples: int


class Boundaries:
    """See the head of this module. The layout's fragments have all arrived at the link.

    Args:
        counters: what happens here is counted in them.
        publish: tells the next heartbeat how training stands, and whether it stands still.
        clock: seconds, monotonic.
        step, cycle_start: optimizer steps so far, and those when the cycle of slots began.

    Attributes:
        step: the optimizer step that has been taken last.
    """

    def __init__(
        self,
        tensors: ModelTensors,
        link: Link,
        settings: Settings,
        reports: Reports,
        counters: SyncMetrics,
        publish: Callable[[bool], None],
        clock: Callable[[], float],
        *,
        step: int,
        cycle_start: int,
    ) -> None:
        config, layout = link.config, link.layout
        assert config is not None and layout is not None
        self.step = step
        self._link = link
        self._settings = settings
        self._reports = reports
        self._counters = counters
        self._publish = publish
        self._clock = clock
        merge = Merge.of(config)
        self._exchanges = [
            self._exchange(layout, fragment, tensors, merge)
            for fragment in range(config.num_fragments)
        ]
        self._marks = [
            Mark(step, reports.tokens, reports.samples) for _ in range(config.num_fragments)
        ]
        self.turns = Turns(
            self._sync_every(config),
            config.num_fragments,
            common=config.mode == "sync",
            step=step,
            cycle_start=cycle_start,
        )
        self._warned_of_weights = False
        self._told_carried: dict[int, tuple[int, int | None]] = {}  # by fragment: push id, round
        self._look()

    def _exchange(
        self, layout: ModelLayout, fragment: int, tensors: ModelTensors, merge: Merge
    ) -> FragmentExchange:
        arrival = self._link.take(fragment)
        assert arrival is not None
        return FragmentExchange(layout.fragments[fragment], tensors, self._link, arrival, merge)

    @property
    def unsynced_steps(self) -> int:
        """Steps past a boundary that are not synchronised; of the fragment that has most."""
        flights = [e.flight for e in self._exchanges if e.flight is not None and e.flight.let_go]
        stuck = [flight.steps + self.step - flight.began for flight in flights]
        if self.turns.is_due(self.step):
            stuck.append(self.step - self._marks[self.turns.fragment].step)
        return max(stuck, default=0)

    @property
    def position(self) -> int:
        """Steps in the cycle at hand."""
        return self.turns.position(self.step)

    # What the hook calls.

    def after_step(self, step: int) -> None:
        """An optimizer step has been taken. Returns when training may go on."""
        self.step = step
        self._reports.read(self._clock())
        self._look()
        for exchange in self._by_age():
            flight = exchange.flight
            if flight is not None and step >= flight.wait_at and not flight.let_go:
                self._wait_for(exchange)
        self._set_pace()
        if self.turns.is_due(step) and not self._link.has_ended:
            self._slot()

    def force(self) -> bool:
        """Take the next P turns now. Returns whether all of their deltas are in a version."""
        counted, taken = 0, False
        for _ in self._exchanges:
            self._look()
            turn = self._take_turn()
            if turn is None:
                break
            taken = True
            counted += sum(self._wait_for(exchange) for exchange in turn)
        if taken:
            self.turns.restart(self.step)
        return counted == len(self._exchanges)

    def load(self) -> bool:
        """Put the newest version of every fragment into the model; False when they do not come."""
        link = self._link
        self._look(now=True)
        for exchange in self._exchanges:
            link.want(exchange.fragment)

        def are_here() -> bool:
            return all(exchange.fragment in link.arrivals for exchange in self._exchanges)

        patience = Patience(self._clock)
        while not link.wait_for(are_here, patience.pause()):
            reason = self._why_not_wait()
            if reason is not None:
                self.trouble(f"The newest parameters could not be loaded: {reason}.")
                return False
            patience.say(f"Waiting for the newest parameters; {link.describe()}.")
        news = link.take_news()
        self._absorb(news)
        for exchange in self._exchanges:
            if exchange.rejection is not None:
                self._settle(exchange)
            if exchange.load(news.arrivals[exchange.fragment]):
                self._has_counted(exchange)
        # The steps since the last freeze are gone, and so is what was reported with them.
        self._reports.read(self._clock(), at_once=True)
        self._marks = [self._mark() for _ in self._exchanges]
        self.restart()
        return True

    def leave(self) -> None:
        """Wait for what is in flight, at most `timeout` seconds in all. The model stays as it is.

        A flight of a later round is not waited for, but its chunks are, so that it counts there.
        """
        until = self._clock() + self._settings.timeout
        for exchange in self._by_age():
            self._wait_for(exchange, until=until, leaving=True)

    def restart(self) -> None:
        """The next slot is a whole distance away."""
        self.turns.restart(self.step)

    def trouble(self, text: str) -> None:
        """Something went wrong: for the log, and for `last_error`."""
        logger.warning("%s", text)
        self._link.last_error = text

    # Slots.

    def _slot(self) -> None:
        """A slot is due: take a turn, and wait for its reply where that is to be merged at once."""
        turn = self._take_turn()
        if turn is None:
            return  # it stays due
        self.turns.use_slot(self.step)
        for exchange in turn:
            if exchange.flight is not None and self.step >= exchange.flight.wait_at:
                self._wait_for(exchange)
        self._set_pace()

    def _take_turn(self) -> list[FragmentExchange] | None:
        """Push the fragment whose turn it is.

        Returns the fragment, if it is in flight for this turn now; None when the turn cannot be taken
        yet, because the fragment's last flight is still under way.
        """
        turns = self.turns
        while turns.turn() is Turn.BUSY:
            exchange = self._exchanges[turns.fragment]
            if self._why_not_wait(exchange) is not None or not self._wait_for(exchange):
                return None
        exchange = self._exchanges[turns.fragment]
        match turns.turn():
            case Turn.PAST:
                turns.pass_by()
                return []
            case Turn.TAKEN:
                assert exchange.flight is not None
                exchange.wait_again(self.step)
                turns.pass_by()
                return [exchange]
            case _:
                self._settle(exchange, now=True)
                if not self._freeze(exchange):
                    return []
                turns.push()
                return [exchange]

    def _freeze(self, exchange: FragmentExchange) -> bool:
        """Freeze what was learnt since the fragment's last freeze and hand it to the link."""
        link, fragment = self._link, exchange.fragment
        config = link.config
        assert config is not None
        began = self._clock()
        self._reports.read(began, at_once=True)
        work = self._work(fragment, config)
        if self._settings.heartbeat_interval != 0:
            self._publish(False)
            link.pulse()
        dtype = self._settings.wire_dtype or config.wire_dtype
        frozen = exchange.freeze(dtype, self.step, work)
        self._counters.seconds_waited += self._clock() - began
        if not isinstance(frozen, NonFinite):
            return True
        self._counters.rejected += 1
        self.trouble(
            f"The pseudo-gradient of {work.steps} steps is not finite in {frozen.name}"
            f"{_fp16_hint(dtype)}; it was not sent, and the model is back at the last global "
            "parameters. The other workers wait until the next boundary. If it happens again, "
            "lower the learning rate or clip gradients."
        )
        # What is not finite in one fragment has spread through the others.
        for each in self._exchanges:
            each.restore()
            self._marks[each.fragment] = self._mark()
        return False

    def _work(self, fragment: int, config: RunConfig) -> Work:
        """What was done since the fragment's last freeze; from here on it counts anew."""
        then, now = self._marks[fragment], self._mark()
        self._marks[fragment] = now
        tokens, samples = now.tokens - then.tokens, now.samples - then.samples
        counts = {"tokens": tokens, "samples": samples}
        name = config.weight_by
        if counts.get(name, 1) <= 0 and not self._warned_of_weights:
            self._warned_of_weights = True
            self.trouble(
                f"This run weighs each contribution by its {name}, and none were reported; call "
                f"report({name}=...) after each step, or the broker will refuse what this worker "
                "sends."
            )
        return Work(now.step - then.step, tokens, samples, self._reports.loss)

    def _mark(self) -> Mark:
        return Mark(self.step, self._reports.tokens, self._reports.samples)

    def _set_pace(self) -> None:
        config = self._link.config
        assert config is not None
        self.turns.pace(self._sync_every(config), self.step)

    def _sync_every(self, config: RunConfig) -> int:
        """H: this worker's own, what the broker has worked out for it, or the run's."""
        own, worked_out = self._settings.sync_every, self._link.sync_every
        if own is not None:
            return own
        if config.dylu and self._settings.dylu is not False and worked_out is not None:
            return worked_out
        return config.sync_every

    # News and waiting.

    def _by_age(self) -> list[FragmentExchange]:
        """The fragments in flight, the oldest flight first."""
        flying = [(e.flight.began, e.fragment) for e in self._exchanges if e.flight is not None]
        return [self._exchanges[fragment] for _, fragment in sorted(flying)]

    def _look(self, *, now: bool = False) -> None:
        """Take in what has come, and merge what is due (`now`: all of it). Never waits."""
        if self._has_news:
            self._absorb(self._link.take_news())
        for exchange in self._exchanges:
            self._settle(exchange, now=now)

    @property
    def _has_news(self) -> bool:
        return self._link.has_news or bool(self._link.turns)

    def _absorb(self, news: News) -> None:
        """Take in what has come; the model stays as it is."""
        for fragment, arrival in news.arrivals.items():
            if fragment < len(self._exchanges):
                self._exchanges[fragment].take_in(arrival)
        for exchange in self._exchanges:
            flight = exchange.flight
            if flight is not None and flight.push_id in news.rejections:
                exchange.reject(news.rejections[flight.push_id])
        turns = self.turns
        for arrival in news.arrivals.values():
            if arrival.released.averaged:  # the first version of a broker was made in no round
                turns.made(arrival.released.round)
        # After the arrivals: a welcome may come from a broker that has gone back behind them.
        over = {e.fragment for e in self._exchanges if e.is_over and e.fragment in turns.rounds}
        for event in news.turns:
            match event:
                case Joined(welcome):
                    turns.welcomed(welcome.first_round, over)
                case Granted(push_id, fragment, standing, round_):
                    flight = self._exchanges[fragment].flight
                    if flight is not None and flight.push_id == push_id:
                        turns.granted(fragment, standing, round_)
                case Carried(fragment, round_):
                    turns.carried(fragment, round_)
        for fragment in over:
            exchange = self._exchanges[fragment]
            if exchange.reply is not None or exchange.rejection is None:
                turns.landed(fragment)
            else:
                turns.dropped(fragment, too_late=exchange.rejection.code == Code.LATE)

    def _wait_for(
        self, exchange: FragmentExchange, *, until: float | None = None, leaving: bool = False
    ) -> bool:
        """Wait until the flight of a fragment has counted, and merge it. Returns whether it has.

        Waits while the broker shows signs of life, at most until a moment of the clock. Giving up,
        training goes on with the delta in flight. `leaving`: the model stays as it is.
        """
        link, flight = self._link, exchange.flight
        if flight is None:
            return False
        began = self._clock()
        patience = Patience(self._clock)
        outcome, reason = Outcome.NOTHING, None
        self._publish(True)
        while True:
            self._absorb(link.take_news())
            outcome = self._settle(exchange, now=True, touch_model=not leaving)
            if exchange.flight is None:
                break
            reason = self._why_not_wait(exchange)
            left = None if until is None else until - self._clock()
            if left is not None and left <= 0:
                reason = reason or f"it took longer than {self._settings.timeout:g} s"
            if reason is not None or not self._is_worth_it(exchange, leaving=leaving):
                break
            patience.say(f"Waiting for {self._awaited}; {link.describe()}.")
            pause = patience.pause(self._look_again_in())
            # News, or a change that may end the waiting.
            link.wait_for(
                lambda: (
                    self._has_news
                    or self._why_not_wait(exchange) is not None
                    or not self._is_worth_it(exchange, leaving=leaving)
                ),
                pause if left is None else min(pause, left),
            )
        self._counters.seconds_waited += self._clock() - began
        if exchange.flight is not None:
            self._stop_waiting(exchange, reason, touch_model=not leaving)
        return outcome is Outcome.COUNTED

    def _is_worth_it(self, exchange: FragmentExchange, *, leaving: bool) -> bool:
        """Whether waiting for a flight leads anywhere, if the broker is there.

        Who leaves waits at least until the flight is in, or what is missing of it is lost. Of one that
        is put off nothing is taken before its round, which may be waiting for this worker.
        """
        if self.turns.may_wait(exchange.fragment):
            return True
        flight, link = exchange.flight, self._link
        assert flight is not None
        return leaving and flight.push_id not in link.uploaded | link.put_off

    @property
    def _awaited(self) -> str:
        return "the round to close" if self.turns.common else "the version with this push"

    def _stop_waiting(
        self, exchange: FragmentExchange, reason: str | None, *, touch_model: bool
    ) -> None:
        flight, round_ = exchange.flight, self.turns.rounds.get(exchange.fragment)
        assert flight is not None
        if touch_model:
            exchange.train_on()
        if reason is None:
            if (flight.push_id, round_) != self._told_carried.get(exchange.fragment):
                self._told_carried[exchange.fragment] = (flight.push_id, round_)
                logger.info(
                    "The pseudo-gradient of %d steps is carried into round %s%s.",
                    flight.steps,
                    round_,
                    "; training goes on" if touch_model else ", which may go on without it",
                )
        elif touch_model:
            self.trouble(
                f"Training goes on with {flight.steps} steps in flight: {reason}. They are merged "
                "when the broker has counted them."
            )
        else:
            self.trouble(f"Leaving with {flight.steps} steps in flight: {reason}.")

    def _settle(
        self, exchange: FragmentExchange, *, now: bool = False, touch_model: bool = True
    ) -> Outcome:
        flight, rejection = exchange.flight, exchange.rejection
        outcome = exchange.settle(self.step, now=now, touch_model=touch_model)
        if outcome is Outcome.COUNTED:
            assert flight is not None
            self._counters.late_merges += self.step > flight.apply_at and touch_model
            self._has_counted(exchange)
        elif outcome is Outcome.REJECTED:
            assert flight is not None and rejection is not None
            self._counters.rejected += 1
            if rejection.code in (Code.LATE, Code.STALE):
                # Newer parameters are there: local moves onto them as soon as they have come.
                self._link.want(exchange.fragment)
                self.trouble(
                    f"The pseudo-gradient of {flight.steps} steps was dropped: {rejection.text} "
                    "The model moves on to the newest global parameters."
                )
            else:
                self.trouble(
                    "The broker dropped the last pseudo-gradient; the model is back at the global "
                    "parameters it started from, and takes part again at the next boundary."
                )
        return outcome

    def _has_counted(self, exchange: FragmentExchange) -> None:
        self._counters.rounds += 1
        self._counters.staleness = exchange.staleness
        logger.debug("Version %s contains the last pseudo-gradient.", exchange.version)

    def _why_not_wait(self, exchange: FragmentExchange | None = None) -> str | None:
        """Why a boundary waits no longer; None while it does."""
        link, settings = self._link, self._settings
        if link.has_ended:
            return f"the link has ended ({link.last_error})"
        if link.stopping is not None:
            return "the broker is stopping"
        if link.phase is Phase.REFUSED:
            return f"the broker refuses this worker ({link.refusal})"
        silence = link.silence()
        if silence is not None and silence >= settings.timeout:
            return f"no sign of life from {link.address} for {silence:.0f} s"
        flight = exchange.flight if exchange is not None else None
        if flight is not None and not flight.let_go:
            broken = link.reconnections - flight.reconnections
            if broken > settings.max_sync_retries:
                return f"the connection broke {broken} times at this boundary"
        return None

    def _look_again_in(self) -> float:
        """Seconds until silence alone ends the waiting, if nothing is heard."""
        return max(0.0, self._settings.timeout - (self._link.silence() or 0.0))


def _fp16_hint(dtype: str) -> str:
    return " after rounding to fp16, whose largest value is 65504" if dtype == "fp16" else ""
