"""What happens after each optimizer step: freezing, waiting and merging, over all fragments.

Between its slot and its apply point a fragment costs the training thread nothing: the link sends and
receives meanwhile. At the slot the delta is copied, subtracted and encoded; at the apply point the
reply is copied into the model. `turns` says whose turn it is and who may be waited for, `exchange` what
becomes of one fragment. Belongs to the training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

from diloco_protocol import Code, RunConfig
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.messages import Released
from diloco_worker.core.compatibility import sync_every
from diloco_worker.core.connection import Phase
from diloco_worker.core.effects import Carried, Granted, Joined
from diloco_worker.core.sync.metrics import SyncMetrics
from diloco_worker.core.sync.news import News
from diloco_worker.core.sync.schedule import RoundSchedule, TurnState
from diloco_worker.core.sync.stillness import Stillness
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.model.values import Constants
from diloco_worker.shell.link import Link
from diloco_worker.training.fragment_sync import (
    FragmentExchange,
    Ground,
    Merge,
    NonFinite,
    Outcome,
    Work,
)
from diloco_worker.training.landings import Landings
from diloco_worker.training.patience import HASTY_S, Leaving, Patience
from diloco_worker.training.push_log import Audit
from diloco_worker.training.reports import Reports
from diloco_worker.training.saved_state import Place, Resumption, compared, known_pushes
from diloco_worker.training.settings import Settings
from diloco_worker.training.sync_lines import SyncLines
from diloco_worker.training.tally import Tally

logger = logging.getLogger("diloco.worker")


class Boundaries:
    """See the head of this module. The layout's fragments have all arrived at the link.

    Args:
        counters: what happens here is counted in them.
        publish: tells the next heartbeat how training stands, and whether it stands still.
        audit: is told of each push that begins and ends.
        why_stop: why the process is about to end, so that nothing is waited for; None while it is not.
        waiting: a context in which Ctrl-C comes at once.
        clock: seconds, monotonic.
        step, cycle_start: optimizer steps so far, and those when the cycle of slots began.
        resumption: what to go on from, where the model is as it was then.

    Attributes:
        step: the optimizer step that has been taken last.
    """

    def __init__(
        self,
        worker_id: str,
        tensors: ModelTensors,
        link: Link,
        settings: Settings,
        reports: Reports,
        counters: SyncMetrics,
        publish: Callable[[bool], None],
        audit: Audit,
        why_stop: Callable[[], str | None],
        waiting: Callable[[], AbstractContextManager[None]],
        clock: Callable[[], float],
        *,
        step: int,
        cycle_start: int,
        resumption: Resumption | None = None,
    ) -> None:
        config, layout = link.config, link.layout
        assert config is not None and layout is not None
        self.step = step
        self._worker_id = worker_id
        self._link = link
        self._settings = settings
        self._reports = reports
        self._counters = counters
        self._publish = publish
        self._audit = audit
        self._why_stop = why_stop
        self._waiting = waiting
        self._clock = clock
        merge = Merge.of(config)
        starts = resumption.grounds if resumption else [None] * config.num_fragments
        self._exchanges = [
            self._exchange(part, tensors, merge, start)
            for part, start in zip(layout.fragments, starts, strict=True)
        ]
        done = [start.work if start else Work() for start in starts]
        self._tally = Tally(reports, step, done)
        self.turns = RoundSchedule(
            self._sync_every(config),
            config.num_fragments,
            common=config.mode == "sync",
            step=step,
            cycle_start=cycle_start,
        )
        self._constants = Constants(tensors)
        self._watch = tensors.watch
        self._warned_of_weights = False
        self._stillness = Stillness(config.num_fragments)
        self._lines = SyncLines(
            clock,
            counters.seconds_waited,
            has_rounds=config.mode == "sync",
            has_fragments=config.num_fragments > 1,
        )
        self._landings = Landings(
            worker_id, link, counters, audit, self._tally, self._lines, self.trouble
        )
        self._told_carried: dict[int, tuple[int, int | None]] = {}  # by fragment: push id, round
        self._leaving: Leaving | None = None
        if resumption is None:
            self._look()
        else:
            self._go_on(resumption, cycle_start)

    def _exchange(
        self,
        part: FragmentLayout,
        tensors: ModelTensors,
        merge: Merge,
        start: Ground | None,
    ) -> FragmentExchange:
        arrival = self._link.take(part.fragment)
        assert arrival is not None
        exchange = FragmentExchange(part, tensors, self._link, start or arrival, merge)
        news = compared(self._worker_id, start, arrival) if start is not None else None
        if news is not None:
            exchange.take_in(news)
        return exchange

    def _go_on(self, resumption: Resumption, cycle_start: int) -> None:
        """Take up the cycle and the flights of a previous life of this worker; see `former`."""
        place = resumption.place
        self.turns.resume_cycle(self.step, cycle_start, place.slot, place.sync_every)
        self.turns.resume_flights([each.fragment for each in self._by_age()], place.cursor)
        self._set_pace()
        kept = [
            (exchange, ground)
            for exchange, ground in zip(self._exchanges, resumption.grounds, strict=True)
            if exchange.reply is None or not exchange.reply.superseding
        ]
        self._look()
        for exchange, ground in kept:
            self._link.verify_pushes(exchange.fragment, known_pushes(self._worker_id, ground))
        flights = [each for each in self._by_age() if not each.is_over]
        for exchange in flights:
            exchange.offer()
        logger.info(
            "Going on from a checkpoint at step %d, %d steps into the cycle, with %d deltas in flight.",
            self.step,
            self.position,
            len(flights),
        )

    def resumption(self) -> tuple[Place, tuple[Ground, ...]] | None:
        """What another life of this worker goes on from; shares memory with this one.

        None while a merge is broken off: a part of the model is ahead of the rest.
        """
        if any(exchange.is_torn for exchange in self._exchanges):
            return None
        self._reports.read(self._clock(), at_once=True)
        turns, tally = self.turns, self._tally
        grounds = tuple(
            each.ground(tally.since(each.fragment, self.step)) for each in self._exchanges
        )
        return Place(turns.sync_every, turns.slot, turns.cursor), grounds

    @property
    def unsynced_steps(self) -> int:
        """Steps past a boundary that are not synchronised; of the fragment that has most."""
        flights = [(e.flight, e.is_torn) for e in self._exchanges if e.flight is not None]
        stuck = [f.steps + self.step - f.began for f, is_torn in flights if is_torn or f.let_go]
        if self.turns.is_due(self.step):
            stuck.append(self._tally.since(self.turns.fragment, self.step).steps)
        return max(stuck, default=0)

    @property
    def position(self) -> int:
        """Steps in the cycle at hand."""
        return self.turns.position(self.step)

    # What the hook calls.

    def after_step(self, step: int) -> None:
        """An optimizer step has been taken. Returns when training may go on."""
        self.step = step
        merged = self._counters.rounds
        self._reports.read(self._clock())
        self._look()
        self._send_frozen()
        for exchange in self._by_age():
            flight = exchange.flight
            if flight is not None and step >= flight.wait_at and not flight.let_go:
                self._wait_for(exchange)
        self._set_pace()
        if self.turns.is_due(step) and not self._link.has_ended:
            self._slot()
        if self._counters.rounds != merged and self._settings.heartbeat_interval != 0:
            # Displays count inner steps from here; the next heartbeat may be half a minute away.
            self._publish(False)
            self._link.beat_now()
        self._lines.say(self._counters.seconds_waited)

    def force(self) -> bool:
        """Take the next P turns now. Returns whether all of their deltas are in a version."""
        counted, taken = 0, False
        for _ in self._exchanges:
            self._look()
            self._send_frozen()
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
            link.request_version(exchange.fragment)

        def are_here() -> bool:
            return all(exchange.fragment in link.arrivals for exchange in self._exchanges)

        patience = Patience(self._clock)
        while not are_here():
            reason = self._why_not_wait()
            if reason is not None:
                self.trouble(f"The newest parameters could not be loaded: {reason}.")
                return False
            patience.say(f"Waiting for the newest parameters; {link.describe()}.")
            pause = patience.pause(self._look_again_in())
            self._wait(lambda: are_here() or self._why_not_wait() is not None, pause)
        news = link.take_news()
        self._absorb(news)
        for exchange in self._exchanges:
            if exchange.rejection is not None or exchange.is_torn:
                self._settle(exchange)
            if not exchange.is_torn:
                exchange.load(news.arrivals[exchange.fragment])
                self._settle(exchange)
        # The steps since the last freeze are gone, and so is what was reported with them.
        self._reports.read(self._clock(), at_once=True)
        for exchange in self._exchanges:
            self._tally.restart(exchange.fragment, self.step)
        self.restart()
        return not any(exchange.is_torn for exchange in self._exchanges)

    def leave(self, *, hasty: bool = False) -> None:
        """Wait for what is in flight, at most `timeout` seconds in all. The model stays as it is.

        A flight of a later round is not waited for, but its chunks are, so that it counts there.

        Args:
            hasty: wait only until the chunks of each flight are in, and not for long.
        """
        limit = min(HASTY_S, self._settings.timeout) if hasty else self._settings.timeout
        self._leaving = Leaving(self._clock() + limit, limit, hasty)
        for exchange in self._exchanges:
            if exchange.is_torn:
                self._settle(exchange)
        for exchange in self._by_age():
            self._wait_for(exchange)
        self._lines.say(self._counters.seconds_waited, at_once=True)

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
        while turns.turn() is TurnState.BUSY:
            exchange = self._exchanges[turns.fragment]
            if self._why_not_wait(exchange) is not None or not self._wait_for(exchange):
                return None
        exchange = self._exchanges[turns.fragment]
        match turns.turn():
            case TurnState.PAST:
                turns.skip()
                return []
            case TurnState.TAKEN:
                assert exchange.flight is not None
                exchange.wait_again(self.step, turns.sync_every)
                turns.skip()
                return [exchange]
            case _:
                self._settle(exchange, now=True)
                if exchange.is_torn:
                    return None
                if not self._freeze(exchange):
                    return []
                self._send(exchange)
                return [exchange]

    def _freeze(self, exchange: FragmentExchange) -> bool:
        """Freeze what was learnt since the fragment's last freeze. Returns whether it can be sent."""
        link, fragment = self._link, exchange.fragment
        config = link.config
        assert config is not None
        began = self._clock()
        self._reports.read(began, at_once=True)
        work = self._tally.since(fragment, self.step)
        self._warn_of_weights(work, config)
        changed = self._watch.look() if self._watch is not None else None
        if changed is not None:
            self.trouble(changed)
        if self._settings.heartbeat_interval != 0:
            self._publish(False)
            link.beat_now()
        dtype = self._settings.wire_dtype or config.wire_dtype
        frozen = exchange.freeze(dtype, self.step, work, self.turns.sync_every)
        self._tally.restart(fragment, self.step)
        self._counters.seconds_waited += self._clock() - began
        for change in self._constants.warnings():
            self.trouble(change)
        if not isinstance(frozen, NonFinite):
            warning = self._stillness.pushed(fragment, frozen.push.norm, work.steps)
            if warning is not None:
                self.trouble(warning)
            return True
        self._counters.rejected += 1
        self.trouble(
            f"The pseudo-gradient of {work.steps} steps is not finite in {_where(frozen, dtype)}; it "
            "was not sent, and the model is back at the last global parameters. The other workers wait "
            "until the next boundary. If it happens again, lower the learning rate or clip gradients."
        )
        # What is not finite in one fragment has spread through the others.
        for each in self._exchanges:
            each.restore()
            self._settle(each)
            self._tally.restart(each.fragment, self.step)
        return False

    def _send(self, exchange: FragmentExchange) -> None:
        """Hand what is frozen to the link. Interrupted, it is done again."""
        flight, turns = exchange.flight, self.turns
        assert flight is not None
        self._audit.frozen(flight)
        if turns.fragment == exchange.fragment and turns.turn() is TurnState.FREE:
            turns.push()
        exchange.offer()

    def _send_frozen(self) -> None:
        """Send what was frozen and not sent, because an interrupt came in between."""
        for exchange in self._exchanges:
            flight = exchange.flight
            if flight is not None and not flight.is_offered and not exchange.is_over:
                self._send(exchange)
                if self.turns.is_due(flight.began):
                    self.turns.use_slot(flight.began)

    def _warn_of_weights(self, work: Work, config: RunConfig) -> None:
        counts = {"tokens": work.tokens, "samples": work.samples}
        name = config.weight_by
        if counts.get(name, 1) <= 0 and not self._warned_of_weights:
            self._warned_of_weights = True
            self.trouble(
                f"This run weighs each contribution by its {name}, and none were reported; call "
                f"report({name}=...) after each step, or the broker will refuse what this worker "
                "sends."
            )

    def _set_pace(self) -> None:
        config = self._link.config
        assert config is not None
        self.turns.pace(self._sync_every(config), self.step)

    def _sync_every(self, config: RunConfig) -> int:
        settings = self._settings
        worked_out = None if settings.dylu is False else self._link.sync_every
        return sync_every(config, settings.sync_every, worked_out)

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
                case Released(averaged=averaged, round=round_):
                    if averaged:  # the first version of a broker was made in no round
                        turns.made(round_)
        for fragment in over:
            exchange = self._exchanges[fragment]
            reply, rejection = exchange.reply, exchange.rejection
            if reply is not None and not reply.superseding:
                turns.landed(fragment)
            else:
                is_late = rejection is not None and rejection.code == Code.LATE
                turns.dropped(fragment, too_late=is_late)

    def _wait_for(self, exchange: FragmentExchange) -> bool:
        """Wait until the flight of a fragment has counted, and merge it. Returns whether it has.

        Waits while the broker shows signs of life. Giving up, training goes on with the delta in
        flight. When leaving, at most until that has taken too long, and the model stays as it is.
        """
        link, flight = self._link, exchange.flight
        if flight is None:
            return False
        began, leaving = self._clock(), self._leaving
        touch_model = leaving is None
        patience = Patience(self._clock)
        outcome, reason = Outcome.NOTHING, None
        self._publish(True)
        while True:
            self._absorb(link.take_news())
            outcome = self._settle(exchange, now=True, touch_model=touch_model)
            if exchange.flight is None or exchange.is_torn:
                break
            reason = self._why_not_wait(exchange)
            left = None if leaving is None else leaving.until - self._clock()
            if leaving is not None and left is not None and left <= 0:
                reason = reason or f"it took longer than {leaving.limit:g} s"
            if reason is not None or not self._is_worth_it(exchange):
                break
            self._lines.say(self._counters.seconds_waited)
            patience.say(f"Waiting for {self._awaited}; {link.describe()}.")
            pause = patience.pause(min(self._look_again_in(), self._lines.due_in))
            # News, or a change that may end the waiting.
            self._wait(
                lambda: (
                    self._has_news
                    or self._why_not_wait(exchange) is not None
                    or not self._is_worth_it(exchange)
                ),
                pause if left is None else min(pause, left),
            )
        self._counters.seconds_waited += self._clock() - began
        if exchange.flight is not None and not exchange.is_torn:
            self._stop_waiting(exchange, reason, touch_model=touch_model)
        return outcome is Outcome.COUNTED

    def _wait(self, what: Callable[[], bool], timeout: float) -> bool:
        with self._waiting():
            return self._link.wait_for(what, timeout)

    def _is_worth_it(self, exchange: FragmentExchange) -> bool:
        """Whether waiting for a flight leads anywhere, if the broker is there.

        Who leaves waits at least until the flight is in, or what is missing of it is lost. Of one that
        is put off nothing is taken before its round, which may be waiting for this worker.
        """
        leaving = self._leaving
        is_hasty = leaving is not None and leaving.hasty
        if self.turns.may_wait(exchange.fragment) and not is_hasty:
            return True
        flight, link = exchange.flight, self._link
        assert flight is not None
        if leaving is None:
            return False
        # A broker that goes away may give up the round in which the chunks are.
        return link.restarting is not None or flight.push_id not in link.uploaded | link.put_off

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
        if reason is None and flight.push_id in self._link.uploaded and not touch_model:
            logger.info(
                "The pseudo-gradient of %d steps is in at the broker, where it counts.",
                flight.steps,
            )
        elif reason is None:
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
            away = "; the broker restarts and was not back" if self._link.restarting else ""
            self.trouble(f"Leaving with {flight.steps} steps in flight: {reason}{away}.")

    def _settle(
        self, exchange: FragmentExchange, *, now: bool = False, touch_model: bool = True
    ) -> Outcome:
        return self._landings.settle(exchange, self.step, now=now, touch_model=touch_model)

    def _why_not_wait(self, exchange: FragmentExchange | None = None) -> str | None:
        """Why a boundary waits no longer; None while it does."""
        link, settings = self._link, self._settings
        stopping = self._why_stop()
        if stopping is not None and self._leaving is None:
            return stopping
        if link.has_ended:
            return f"the link has ended ({link.last_error})"
        if link.stopping is not None:
            return "the run is over"
        if link.restarting is not None and self._leaving is None:
            return "the broker restarts"
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


def _where(bad: NonFinite, dtype: str) -> str:
    if bad.is_buffer:
        return (
            f"{bad.name}, a buffer (one that is to hold infinities must hold them from the start)"
        )
    hint = " after rounding to fp16, whose largest value is 65504"
    return bad.name + (hint if dtype == "fp16" else "")
