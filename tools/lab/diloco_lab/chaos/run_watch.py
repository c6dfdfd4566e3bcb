"""Watches a run from outside: new versions, joined workers, and scheduled actions.

Each wait has a bound and an error message, and during it the scheduled actions (`when`) are carried out
at their time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from diloco_lab.chaos.audit import BROKER_LOG, Record
from diloco_lab.chaos.crew import AUDIT, Crew, Incarnation
from diloco_tools.processes import JsonLines

TURN_S = 0.03  # between two looks
STANDSTILL_S = 25.0  # without a new version: the run hangs
MODE_S = 300.0  # bound of a mode on two idle cores, where it takes less than 100


class Broken(Exception):
    """A promise is broken and the drill cannot continue; the message names it."""


class RunWatch:
    """See the head of this module. Times are of the monotonic clock.

    `slowness` is that of this machine, by which each bound is multiplied.
    """

    def __init__(self, crew: Crew, slowness: float) -> None:
        self.crew = crew
        self.slowness = slowness
        self._began = time.monotonic()
        # The versions so far, except the first ones, each with the time at which it was seen.
        self.seen: list[tuple[float, Record]] = []
        self._log = JsonLines(crew.folder / BROKER_LOG)
        self._logs: dict[str, JsonLines] = {}
        self._put_off: list[tuple[Callable[[], bool], Callable[[], object]]] = []

    @property
    def rounds(self) -> float:
        """Rounds so far, as they are counted in this mode (see `Mode`)."""
        return len(self.seen) / self.crew.mode.versions_a_round

    def stretched(self, seconds: float) -> float:
        """A bound for two idle cores, scaled for this machine."""
        return round(seconds * self.slowness, 2)

    @property
    def is_quiet(self) -> bool:
        return not self._put_off

    def when(self, condition: Callable[[], bool], action: Callable[[], object]) -> None:
        """Schedule an action for when a condition holds."""
        self._put_off.append((condition, action))

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        due = time.monotonic() + seconds
        self.when(lambda: time.monotonic() >= due, action)

    def look(self) -> None:
        """Read new records, and carry out due actions."""
        now = time.monotonic()
        self.seen += [(now, each) for each in self._log.new() if each["after"] is not None]
        for incarnation in self.crew.incarnations:
            if incarnation.ended_at is None:
                self._look_at(incarnation, now)
        for pair in list(self._put_off):
            condition, action = pair
            if condition():
                self._put_off.remove(pair)
                action()

    def _look_at(self, incarnation: Incarnation, now: float) -> None:
        log = self._logs.setdefault(incarnation.name, JsonLines(incarnation.file(AUDIT)))
        for record in log.new():
            if record["event"] == "joined" and incarnation.joined_at is None:
                incarnation.joined_at = now
            elif record["event"] == "left":
                incarnation.ended_at = now
        if incarnation.ended_at is None and not incarnation.child.running:
            raise Broken(str(incarnation.child.failure()))

    def wait_until(
        self, condition: Callable[[], bool], seconds: float, sentence: str, every: float = TURN_S
    ) -> None:
        """Wait until a condition holds; raises Broken with the sentence after `seconds`, scaled for this
        machine.

        The condition is checked each `every` seconds, the run itself all the time.
        """
        until = time.monotonic() + self.stretched(seconds)
        self.look()
        while not condition():
            now = time.monotonic()
            if now - self._began > self.stretched(MODE_S):
                raise Broken(
                    f"The run was not over in time ({self.stretched(MODE_S):g} s). {sentence}"
                )
            if now > until:
                raise Broken(sentence)
            for each in (self.crew.broker, *self.crew.relays.values()):
                if not each.running and self.is_quiet:
                    raise Broken(str(each.failure()))
            self.pause(every)

    def wait_rounds(self, rounds: float, after: str) -> None:
        """Wait until this many more rounds have closed; raises Broken if the run stands still."""
        target = len(self.seen) + rounds * self.crew.mode.versions_a_round
        seconds = self.stretched(STANDSTILL_S)
        sentence = f"No round closed for {seconds:g} s after {after}."
        while (have := len(self.seen)) < target:
            self.wait_until(partial(self._has_more_than, have), STANDSTILL_S, sentence)

    def _has_more_than(self, versions: int) -> bool:
        return len(self.seen) > versions

    def pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(TURN_S)
            self.look()

    def await_joined(self, worker: str) -> Incarnation:
        """Wait until the latest incarnation of a worker takes part."""

        def takes_part() -> bool:
            incarnation = self.crew.incarnation(worker)
            return incarnation.joined_at is not None and incarnation.ended_at is None

        seconds = self.stretched(STANDSTILL_S)
        sentence = f"{worker} did not join within {seconds:g} s."
        self.wait_until(takes_part, STANDSTILL_S, sentence)
        return self.crew.incarnation(worker)
