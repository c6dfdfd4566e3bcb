"""Workers of one run that one thread steps in turn: none of them waits for another one forever.

A boundary waits until the other workers have pushed. A worker that the same thread steps would never
get to push. So such a boundary is put off: it is suspended where it waits, the step returns, and the
others make theirs. The last worker of the thread that pushes for a round waits for all of them, and
every model is merged before any of them makes another step: each sees what it would have seen in a
process of its own.

A worker that is stepped before the others have pushed trains on with its delta in flight, and what it
does meanwhile is kept on top of the merge, as when a network is down. A warning says so once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field, replace
from types import coroutine
from typing import Any, TypeVar

from diloco_worker.ports import LocalPorts
from diloco_worker.session.news import Poll
from diloco_worker.settings import Settings
from diloco_worker.sync.state import SyncState

T = TypeVar("T")

# Seconds that the link of one worker is listened to before the next one's.
SLICE_S = 0.02


class RunStandsStill(BaseException):
    """No round has closed for too long. Not an Exception: those never end a training loop."""


@coroutine
def _suspended() -> Generator[None, None, None]:
    yield


@dataclass(eq=False, repr=False, kw_only=True)
class InTurnPorts(LocalPorts):
    """The ports of one of these workers: a boundary that waits is suspended, where that is allowed."""

    suspends: bool = False

    async def wait(self, seconds: float) -> Poll:
        if not self.suspends:
            return await super().wait(seconds)
        await _suspended()
        return self.poll()

    def listen(self, seconds: float) -> None:
        """Block until there may be something new."""
        self._listen(seconds)


@dataclass(eq=False)
class _Worker:
    """One worker, and its boundary that is put off, if any."""

    worker_id: str
    state: SyncState
    ports: InTurnPorts
    thread: int  # that steps it
    boundary: Coroutine[Any, Any, Any] | None = None
    result: Any = None  # of the last boundary
    has_warned: bool = False

    def resume(self) -> None:
        """Run the boundary until it waits, or to its end."""
        assert self.boundary is not None
        self.ports.suspends = True
        try:
            self.boundary.send(None)
        except StopIteration as end:
            self.boundary, self.result = None, end.value
        except BaseException:
            self.boundary = None
            raise
        finally:
            self.ports.suspends = False

    def is_over(self) -> bool:
        """Whether the boundary that was put off, if any, has ended by now."""
        if self.boundary is not None:
            self.resume()
        return self.boundary is None

    def listen(self, seconds: float) -> None:
        """Wait for news of this worker, and take them in. What goes wrong is this worker's own."""
        try:
            self.ports.listen(seconds)
            self.is_over()
        except Exception as error:  # noqa: BLE001  as in a step of its own
            self.state.schedule.restart(self.state.step)
            self.ports.trouble(f"Synchronising failed: {error!r}")

    @property
    def awaited_round(self) -> int | None:
        """The round that it waits for; None in asynchronous mode, or where it waits for none."""
        in_flight = self.state.by_age()
        due = [f for f in in_flight if f.in_flight and self.state.step >= f.in_flight.wait_at]
        awaited = (due or in_flight)[:1]
        return self.state.schedule.rounds.get(awaited[0].number) if awaited else None


@dataclass(eq=False)
class Turns:
    """The workers of a run that live in this process."""

    patience: float  # seconds of waiting before `RunStandsStill`
    why: Callable[[], str]  # what the run waits for, the end of a sentence
    _workers: list[_Worker] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def bounded(self, settings: Settings) -> Settings:
        """These settings, so that a worker's end waits no longer than the run may stand still."""
        return replace(settings, timeout=min(settings.timeout, 2 * self.patience))

    @property
    def worker_ids(self) -> list[str]:
        """Of the workers that are in the run."""
        return [each.worker_id for each in self._workers]

    def join(self, worker_id: str, state: SyncState) -> None:
        assert isinstance(state.ports, InTurnPorts)
        made = _Worker(worker_id, state, state.ports, threading.get_ident())
        with self._lock:
            self._workers.append(made)

    def leave(self, state: SyncState) -> bool:
        """Forget this worker. Returns whether the thread has others, which wait for nothing then."""
        with self._lock:
            leaving = [each for each in self._workers if each.state is state]
            self._workers = [each for each in self._workers if each.state is not state]
        for each in leaving:
            if each.boundary is not None:
                each.boundary.close()
        return bool(self._of_this_thread())

    def steps_here(self, state: SyncState) -> None:
        """This thread steps the worker from now on."""
        self._of(state).thread = threading.get_ident()

    def run(self, state: SyncState, steps: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Run a boundary up to where it waits for others of this thread; returns what it returns."""
        self.steps_here(state)
        worker = self._of(state)
        if not worker.is_over():
            self._warn_of_overtaking(worker)
            return None
        worker.boundary, worker.result = steps(), None
        worker.resume()
        self._wait()
        result: T | None = worker.result
        return result

    def _wait(self) -> None:
        """Let this thread's boundaries that wait for none of its own workers come to their end.

        There is one wherever all of them wait: of those the one in the earliest round.
        """
        began = time.monotonic()
        while waiting := self._waiting_for_others():
            for each in waiting:
                each.listen(SLICE_S)
            still_waiting = self._waiting_for_others()
            if not all(each in still_waiting for each in waiting):
                began = time.monotonic()
            elif time.monotonic() - began > self.patience:
                raise RunStandsStill(f"No round has closed for {self.patience:g} s: {self.why()}.")

    def _waiting_for_others(self) -> list[_Worker]:
        """Workers at a boundary for whose round all workers of this thread have pushed."""
        mine = self._of_this_thread()
        return [each for each in mine if each.boundary is not None and not self._yet_to_push(each)]

    def _yet_to_push(self, worker: _Worker) -> list[_Worker]:
        """The workers of its thread that have yet to push for the round that it waits for."""
        round_ = worker.awaited_round
        if round_ is None:
            return []
        return [w for w in self._of_this_thread() if w.state.schedule.cursor <= round_]

    def _of(self, state: SyncState) -> _Worker:
        return next(each for each in self._workers if each.state is state)

    def _of_this_thread(self) -> list[_Worker]:
        here = threading.get_ident()
        with self._lock:
            mine = [each for each in self._workers if each.thread == here]
        return [each for each in mine if not each.ports.link.has_ended]

    def _warn_of_overtaking(self, worker: _Worker) -> None:
        if not worker.has_warned:
            worker.has_warned = True
            names = ", ".join(sorted(each.worker_id for each in self._yet_to_push(worker)))
            worker.ports.trouble(
                f"{worker.worker_id} makes steps while its round waits for {names}: step the workers of "
                "one thread in turn. These steps are kept on top of the merge."
            )


# The runs of `diloco_worker.testing` in this process, by the broker's address.
RUNS: dict[str, Turns] = {}
