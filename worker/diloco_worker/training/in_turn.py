"""Workers of one run that one thread steps in turn: none of them waits there for another for ever.

A boundary waits until the others have pushed. One that the same thread steps would never come to it. So
such a boundary is put off: the step returns, and the others make theirs. The last of the thread that
pushes for a round waits for all of them, and every model is merged before any of them makes another
step: each sees what it would have seen in a process of its own.

A worker that is stepped before the others have come so far trains on with its delta in flight, and what
it does meanwhile is kept on top of the merge, as when a network is away. It is said once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from diloco_worker.sync import boundary, effects
from diloco_worker.sync.effects import Steps
from diloco_worker.sync.state import SyncState
from diloco_worker.training.driver import Driver

T = TypeVar("T")

# Seconds that the link of one worker is listened to before the next one's.
SLICE_S = 0.02


class RunStandsStill(BaseException):
    """No round has closed for too long. Not an Exception: those never end a training loop."""


@dataclass(eq=False)
class Turns:
    """The workers of a run in this process; see the head of this module."""

    patience: float  # seconds of waiting before `RunStandsStill`
    why: Callable[[], str]  # what the run waits for, the end of a sentence
    drivers: list[InTurn] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def driver(self, **arguments: Any) -> InTurn:
        """What a `DiLoCoWorker` of the run is driven by; the arguments are those of `Driver`."""
        settings = arguments["settings"]  # what bounds the end of the worker comes behind `wait`
        arguments["settings"] = replace(settings, timeout=min(settings.timeout, 2 * self.patience))
        made = InTurn(**arguments, turns=self)
        with self._lock:
            self.drivers.append(made)
        return made

    def left(self, driver: InTurn) -> None:
        with self._lock:
            self.drivers = [each for each in self.drivers if each is not driver]

    def of_this_thread(self) -> list[InTurn]:
        """Those that this thread steps, and that are in the run."""
        here = threading.get_ident()
        with self._lock:
            return [
                each for each in self.drivers if each.thread == here and not each.link.has_ended
            ]

    def wait(self) -> None:
        """Let this thread's boundaries that wait for none of its own workers come to their end.

        There is one wherever all of them wait: of those the one in the earliest round.
        """
        began = time.monotonic()
        while waiting := [each for each in self.of_this_thread() if each.waits_for_others_alone]:
            for each in waiting:
                each.listen(SLICE_S)
            if not all(each.waits_for_others_alone for each in waiting):
                began = time.monotonic()
            elif time.monotonic() - began > self.patience:
                raise RunStandsStill(f"No round has closed for {self.patience:g} s: {self.why()}.")


@dataclass(eq=False, repr=False, kw_only=True)
class InTurn(Driver):
    """One of these workers."""

    turns: Turns
    thread: int = field(default_factory=threading.get_ident)  # that steps it
    _put_off: Steps[Any] | None = None  # a boundary that waits
    _result: Any = None  # of the last boundary
    _has_warned: bool = False

    @property
    def waits_for_others_alone(self) -> bool:
        """It is at a boundary, and all workers of its thread have pushed for the round."""
        return self._put_off is not None and not self._waits_for()

    def _waits_for(self) -> list[InTurn]:
        """Those of its thread that have yet to push for the round that it waits for."""
        state = self.state
        flying = state.by_age()
        due = [f for f in flying if f.flight and state.step >= f.flight.wait_at]
        awaited = (due or flying)[:1]
        round_ = state.schedule.rounds.get(awaited[0].number) if awaited else None
        if round_ is None:  # nothing, or asynchronous
            return []
        mine = self.turns.of_this_thread()
        return [each for each in mine if each.state.schedule.cursor <= round_]

    def after_step(self, step: int) -> None:
        self.thread = threading.get_ident()
        if self._is_over():
            self.reports.read(self.clock())
            self._begin(boundary.after_step(self.state, step))
        else:
            self._has_overtaken()

    def between_steps(self, action: Callable[[SyncState], Steps[T]]) -> T | None:
        """`force_sync` is put off as a boundary is; anything else waits for no other worker."""
        self.thread = threading.get_ident()
        asked: object = action
        if asked is not boundary.force:
            return super().between_steps(action)
        if not self._is_over():
            self._has_overtaken()
            return None
        result: T | None = self._begin(action(self.state))
        return result

    def leave(self, *, hasty: bool) -> None:
        """Others of the thread cannot come to their boundary while this one waits for them."""
        put_off, self._put_off = self._put_off, None
        if put_off is not None:
            put_off.close()
        self.turns.left(self)
        super().leave(hasty=hasty or bool(self.turns.of_this_thread()))

    def _begin(self, steps: Steps[Any]) -> Any:
        """A boundary, up to where it waits for others of this thread; returns what it returns."""
        self._put_off, self._result = steps, None
        self._send(None)
        self.turns.wait()
        return self._result

    def _send(self, answer: Any) -> None:
        """Carry the boundary out until it waits, or to its end."""
        steps = self._put_off
        assert steps is not None
        try:
            effect = steps.send(answer)
            while not isinstance(effect, effects.Wait):
                effect = steps.send(self._do(effect))
        except StopIteration as end:
            self._put_off, self._result = None, end.value
        except BaseException:
            self._put_off = None
            raise

    def _is_over(self) -> bool:
        """Whether the boundary that was put off, if any, has come to its end."""
        if self._put_off is not None:
            self._send(self._look())
        return self._put_off is None

    def listen(self, seconds: float) -> None:
        """Wait for news of this worker, and take them in. What goes wrong is this worker's own."""
        try:
            self._wait(seconds)
            self._is_over()
        except Exception as error:  # noqa: BLE001  as in a step of its own
            self.state.schedule.restart(self.state.step)
            self.trouble(f"Synchronising failed: {error!r}")

    def _has_overtaken(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            names = ", ".join(sorted(each.worker_id for each in self._waits_for()))
            self.trouble(
                f"{self.worker_id} makes steps while its round waits for {names}: step the workers of "
                "one thread in turn. These steps are kept on top of the merge."
            )
