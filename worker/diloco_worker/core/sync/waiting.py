"""Waiting at a boundary until a flight has counted, or until it leads nowhere."""

from __future__ import annotations

from collections.abc import Callable

from diloco_worker.core.sync.effects import KeepAnchor, Look, Say, StandStill, Steps, Trouble, Wait
from diloco_worker.core.sync.flights import Flight, Outcome
from diloco_worker.core.sync.fragment import Fragment
from diloco_worker.core.sync.landings import Landings
from diloco_worker.core.sync.lines import SyncLines
from diloco_worker.core.sync.metrics import SyncMetrics
from diloco_worker.core.sync.patience import Leaving, Patience, may_lack_chunks, why_not_wait
from diloco_worker.core.sync.state import SyncState


class Waiting:
    """See the head of this module.

    Args:
        lines: are said meanwhile.
        metrics: seconds are counted in them.
        clock: seconds, monotonic.

    Attributes:
        leaving: how long to wait at the end of training; None before.
    """

    def __init__(
        self,
        state: SyncState,
        landings: Landings,
        lines: SyncLines,
        metrics: SyncMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.leaving: Leaving | None = None
        self._state = state
        self._landings = landings
        self._lines = lines
        self._metrics = metrics
        self._clock = clock
        self._told_carried: dict[int, tuple[int, int | None]] = {}  # by fragment: push id, round

    def wait_for(self, fragment: Fragment) -> Steps[bool]:
        """Wait until the flight of a fragment has counted, and merge it. Returns whether it has.

        Waits while the broker shows signs of life. Giving up, training goes on with the delta in
        flight. When leaving, at most until that has taken too long, and the model stays as it is.
        """
        if fragment.flight is None:
            return False
        began, leaving = self._clock(), self.leaving
        patience = Patience(self._clock)
        yield StandStill()
        sight = yield Look()
        while True:
            self._state.take_in(sight)
            outcome = yield from self._landings.settle(
                fragment, self._state.step, now=True, touch_model=leaving is None
            )
            flight = fragment.flight
            if flight is None or fragment.is_torn:
                break
            reason = self.why_not(fragment)
            left = None if leaving is None else leaving.until - self._clock()
            if leaving is not None and left is not None and left <= 0:
                reason = reason or f"it took longer than {leaving.limit:g} s"
            if reason is not None or not self._is_worth_it(fragment.number, flight):
                break
            yield from self.say_line()
            if patience.is_due():
                has_rounds = self._state.schedule.common
                awaited = "the round to close" if has_rounds else "the version with this push"
                yield Say(f"Waiting for {awaited}; {self._state.link.description}.", True)
            pause = patience.pause(min(self.look_again_in(), self._lines.due_in))
            sight = yield Wait(pause if left is None else min(pause, left))
        self._metrics.seconds_waited += self._clock() - began
        if flight is not None and not fragment.is_torn:
            yield from self._stop_waiting(fragment, flight, reason)
        return outcome is Outcome.COUNTED

    def _is_worth_it(self, number: int, flight: Flight) -> bool:
        """Whether waiting for a flight leads anywhere, if the broker is there.

        Who leaves waits at least until the flight is in, or what is missing of it is lost.
        """
        leaving = self.leaving
        if self._state.schedule.may_wait(number) and not (leaving is not None and leaving.hasty):
            return True
        return leaving is not None and may_lack_chunks(self._state.link, flight)

    def _stop_waiting(self, fragment: Fragment, flight: Flight, reason: str | None) -> Steps[None]:
        link, is_leaving = self._state.link, self.leaving is not None
        round_ = self._state.schedule.rounds.get(fragment.number)
        if not is_leaving and not flight.let_go:
            yield KeepAnchor(fragment.number)
            flight.let_go = True
        if reason is None and flight.push_id in link.uploaded and is_leaving:
            yield Say(
                f"The pseudo-gradient of {flight.steps} steps is in at the broker, where it counts."
            )
        elif reason is None:
            if (flight.push_id, round_) != self._told_carried.get(fragment.number):
                self._told_carried[fragment.number] = (flight.push_id, round_)
                what_follows = (
                    ", which may go on without it" if is_leaving else "; training goes on"
                )
                yield Say(
                    f"The pseudo-gradient of {flight.steps} steps is carried into round {round_}"
                    f"{what_follows}."
                )
        elif not is_leaving:
            yield Trouble(
                f"Training goes on with {flight.steps} steps in flight: {reason}. They are merged "
                "when the broker has counted them."
            )
        else:
            away = "; the broker restarts and was not back" if link.is_restarting else ""
            yield Trouble(f"Leaving with {flight.steps} steps in flight: {reason}{away}.")

    def why_not(self, fragment: Fragment | None = None) -> str | None:
        """Why a boundary waits no longer; None while it does."""
        flight = fragment.flight if fragment is not None else None
        state, is_leaving = self._state, self.leaving is not None
        return why_not_wait(state.link, state.options, flight, is_leaving=is_leaving)

    def look_again_in(self) -> float:
        """Seconds until silence alone ends the waiting, if nothing is heard."""
        return max(0.0, self._state.options.timeout - (self._state.link.silence or 0.0))

    def say_line(self, *, at_once: bool = False) -> Steps[None]:
        """Log the line of the pushes that have counted, if it is time to."""
        line = self._lines.line(self._metrics.seconds_waited, at_once=at_once)
        if line is not None:
            yield Say(line)
