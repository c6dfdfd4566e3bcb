"""What happens after each optimizer step: freezing, waiting and merging, over all fragments. Pure.

Between its slot and its apply point a fragment costs the training thread nothing: the link sends and
receives meanwhile. `schedule` says whose turn it is and who may be waited for, `fragment` what becomes
of one fragment, `freezing` how a delta begins, `waiting` how long it is waited for, and `landings` what
is written down when it ends.

All that can be asked for are generators that yield effects (`effects`). `training.driver` carries them
out for the hook, and the simulator of the tests for a training thread without tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diloco_worker.core.sync.effects import (
    Look,
    RequestVersion,
    Say,
    Steps,
    Trouble,
    VerifyPushes,
    Wait,
)
from diloco_worker.core.sync.flights import Flight, Outcome
from diloco_worker.core.sync.fragment import Fragment
from diloco_worker.core.sync.freezing import Freezing
from diloco_worker.core.sync.landings import Landings
from diloco_worker.core.sync.lines import SyncLines
from diloco_worker.core.sync.metrics import SyncMetrics
from diloco_worker.core.sync.news import Arrival
from diloco_worker.core.sync.patience import HASTY_S, Leaving, Patience
from diloco_worker.core.sync.resumption import compared, known_pushes
from diloco_worker.core.sync.schedule import SchedulePlace, TurnState
from diloco_worker.core.sync.state import SyncState
from diloco_worker.core.sync.waiting import Waiting
from diloco_worker.core.sync.work import Work


class Boundary:
    """See the head of this module. Begin with `begin`, or with `resume`.

    Args:
        state: what training begins with.
        metrics: what happens here is counted in them.
        clock: seconds, monotonic.
        draw: returns a random number below 2**64 (push ids).

    Attributes:
        state: the fragments, and whose turn it is.
    """

    def __init__(
        self,
        worker_id: str,
        state: SyncState,
        metrics: SyncMetrics,
        clock: Callable[[], float],
        draw: Callable[[], int],
    ) -> None:
        self.state = state
        self._worker_id = worker_id
        self._metrics = metrics
        self._clock = clock
        lines = SyncLines(
            clock,
            metrics.seconds_waited,
            has_rounds=state.schedule.common,
            has_fragments=len(state.fragments) > 1,
        )
        self._landings = Landings(
            worker_id, merge=state.merge, metrics=metrics, work=state.work, lines=lines
        )
        self._freezing = Freezing(state, self._landings, metrics, clock, draw)
        self._waiting = Waiting(state, self._landings, lines, metrics, clock)

    @property
    def is_leaving(self) -> bool:
        """Training has ended, and what is in flight is waited for."""
        return self._waiting.leaving is not None

    def begin(self) -> Steps[None]:
        """Training begins on the versions that it was given."""
        yield from self._look()

    def resume(
        self, place: SchedulePlace, cycle_start: int, arrivals: Sequence[Arrival]
    ) -> Steps[None]:
        """Go on with the cycle and the flights of a previous life of this worker.

        Args:
            arrivals: of each fragment, what the broker has.
        """
        state = self.state
        known = [
            known_pushes(self._worker_id, fragment.base(Work())) for fragment in state.fragments
        ]
        for fragment, arrival in zip(state.fragments, arrivals, strict=True):
            news = compared(self._worker_id, fragment.base(Work()), arrival)
            if news is not None:
                fragment.take_in(news)
        state.schedule.resume_cycle(state.step, cycle_start, place.slot, place.sync_every)
        state.schedule.resume_flights([each.number for each in state.by_age()], place.cursor)
        state.set_pace()
        kept = [f for f in state.fragments if f.reply is None or not f.reply.superseding]
        yield from self._look()
        for fragment in kept:
            yield VerifyPushes(fragment.number, known[fragment.number])
        flights = [each for each in state.by_age() if not each.is_over]
        for fragment in flights:
            yield from self._freezing.offer(fragment, is_new=False)
        yield Say(
            f"Going on from a checkpoint at step {state.step}, "
            f"{state.schedule.position(state.step)} steps into the cycle, with {len(flights)} deltas "
            "in flight."
        )

    def after_step(self, step: int) -> Steps[None]:
        """An optimizer step has been taken. At the end training may go on."""
        state = self.state
        state.step = step
        merged = self._metrics.rounds
        yield from self._look()
        yield from self._freezing.offer_frozen()
        for fragment in state.by_age():
            flight = fragment.flight
            if flight is not None and step >= flight.wait_at and not flight.let_go:
                yield from self._waiting.wait_for(fragment)
        state.set_pace()
        if state.schedule.is_due(step) and not state.link.has_ended:
            yield from self._slot()
        if self._metrics.rounds != merged:
            # Displays count inner steps from here; the next heartbeat may be half a minute away.
            yield from self._freezing.beat()
        yield from self._waiting.say_line()

    def force(self) -> Steps[bool]:
        """Take the next P turns now. Returns whether all of their deltas are in a version."""
        state = self.state
        counted, taken = 0, False
        for _ in state.fragments:
            yield from self._look()
            yield from self._freezing.offer_frozen()
            turn = yield from self._take_turn()
            if turn is None:
                break
            taken = True
            for fragment in turn:
                counted += yield from self._waiting.wait_for(fragment)
        if taken:
            state.schedule.restart(state.step)
        return counted == len(state.fragments)

    def load(self) -> Steps[bool]:
        """Put the newest version of every fragment into the model; False when they do not come."""
        state = self.state
        yield from self._look(now=True)
        for fragment in state.fragments:
            yield RequestVersion(fragment.number)
        newest: dict[int, Arrival] = {}
        patience = Patience(self._clock)
        sight = yield Look()
        while True:
            for number, arrival in state.take_in(sight).arrivals.items():
                newest[number] = arrival.after(newest.get(number))
            if all(fragment.number in newest for fragment in state.fragments):
                break
            reason = self._waiting.why_not()
            if reason is not None:
                yield Trouble(f"The newest parameters could not be loaded: {reason}.")
                return False
            if patience.is_due():
                yield Say(f"Waiting for the newest parameters; {state.link.description}.", True)
            sight = yield Wait(patience.pause(self._waiting.look_again_in()))
        for fragment in state.fragments:
            if fragment.rejection is not None or fragment.is_torn:
                yield from self._settle(fragment)
            if not fragment.is_torn:
                fragment.load(newest[fragment.number])
                yield from self._settle(fragment)
        # The steps since the last freeze are gone, and so is what was reported with them.
        yield from self._freezing.read_reports()
        for fragment in state.fragments:
            state.work.restart(fragment.number, state.step)
        state.schedule.restart(state.step)
        return not state.is_torn

    def leave(self, *, hasty: bool = False) -> Steps[None]:
        """Wait for what is in flight, at most `timeout` seconds in all. The model stays as it is.

        A flight of a later round is not waited for, but its chunks are, so that it counts there.

        Args:
            hasty: wait only until the chunks of each flight are in, and not for long.
        """
        state = self.state
        timeout = state.options.timeout
        limit = min(HASTY_S, timeout) if hasty else timeout
        self._waiting.leaving = Leaving(self._clock() + limit, limit, hasty)
        for fragment in state.fragments:
            if fragment.is_torn:
                yield from self._settle(fragment)
        for fragment in state.by_age():
            yield from self._waiting.wait_for(fragment)
        yield from self._waiting.say_line(at_once=True)

    # Slots.

    def _slot(self) -> Steps[None]:
        """A slot is due: take a turn, and wait for its reply where that is to be merged at once."""
        state = self.state
        turn = yield from self._take_turn()
        if turn is None:
            return  # it stays due
        state.schedule.use_slot(state.step)
        for fragment in turn:
            if fragment.flight is not None and state.step >= fragment.flight.wait_at:
                yield from self._waiting.wait_for(fragment)
        state.set_pace()

    def _take_turn(self) -> Steps[list[Fragment] | None]:
        """Push the fragment whose turn it is.

        Returns the fragment, if it is in flight for this turn now; None when the turn cannot be taken
        yet, because the fragment's last flight is still under way.
        """
        state = self.state
        schedule = state.schedule
        while schedule.turn() is TurnState.BUSY:
            fragment = state.fragments[schedule.fragment]
            if self._waiting.why_not(fragment) is not None:
                return None
            if not (yield from self._waiting.wait_for(fragment)):
                return None
        fragment = state.fragments[schedule.fragment]
        match schedule.turn():
            case TurnState.PAST:
                schedule.skip()
                return []
            case TurnState.TAKEN:
                assert fragment.flight is not None
                self._wait_again(fragment.flight)
                schedule.skip()
                return [fragment]
            case _:
                yield from self._settle(fragment, now=True)
                if fragment.is_torn:
                    return None
                if not (yield from self._freezing.freeze(fragment)):
                    return []
                yield from self._freezing.offer(fragment)
                return [fragment]

    def _wait_again(self, flight: Flight) -> None:
        """The flight counts as if it were frozen behind this step, as to when it is waited for."""
        state = self.state
        flight.let_go = False
        flight.wait_at = state.step + state.merge.longest(state.schedule.sync_every)
        flight.reconnections = state.link.reconnections

    def _look(self, *, now: bool = False) -> Steps[None]:
        """Take in what has come, and merge what is due (`now`: all of it). Never waits."""
        self.state.take_in((yield Look()))
        for fragment in self.state.fragments:
            yield from self._settle(fragment, now=now)

    def _settle(self, fragment: Fragment, *, now: bool = False) -> Steps[Outcome]:
        return self._landings.settle(fragment, self.state.step, now=now)
