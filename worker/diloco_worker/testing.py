"""A whole run inside one process, without a network: for the tests of a training script.

    with LocalRun(workers=2, sync_every=4) as run:
        one = DiLoCoWorker(model, optimizer, server=run.server)
        ...

Broker and workers are the real ones; they communicate over Unix domain sockets in a temporary folder.
One thread may step several workers in turn, or each has its own thread (`LocalRun.train`).

A boundary waits until the other workers have pushed, which workers of the same thread could never do.
So such a boundary is suspended where it waits, and the step returns. The last worker of the thread that
pushes for a round waits for all of them, and every model is merged before any of them makes another
step: each sees what it would have seen in its own process.

A worker that is stepped before the others have pushed trains on with its delta in flight, and its steps
are kept on top of the merge, as when a network is down. A warning says so once.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import coroutine
from typing import Any, TypeVar

from torch import Tensor

from diloco_broker import Broker, BrokerConfig
from diloco_worker.client import DiLoCoClient
from diloco_worker.model.spread.ranks import LOAD
from diloco_worker.ports import PORTS, LocalPorts
from diloco_worker.session.news import Poll
from diloco_worker.sync.state import SyncState

__all__ = ["LocalRun", "RunStalled"]

T = TypeVar("T")

PATIENCE_S = 30.0
# For the others to end when a worker of `LocalRun.train` failed. One that is about to join waits for a
# broker; its thread is not joined.
END_WITHIN_S = 5.0
# Seconds to listen to the link of one worker before the next one's.
SLICE_S = 0.02


class RunStalled(BaseException):
    """No round has closed for too long. Not an Exception: those never end a training loop."""


def __getattr__(name: str) -> Any:
    if name == "RunStandsStill":  # its name until release 1.0
        warnings.warn("RunStandsStill is called RunStalled now.", DeprecationWarning, stacklevel=2)
        return RunStalled
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class LocalRun:
    """A broker in a thread of this process. A context manager.

    Args:
        workers: how many take part; the first round waits for all of them.
        patience: seconds after which a wait for a round ends with `RunStalled`.
        options: of the broker, by their names in `BrokerConfig`: `sync_every`, `outer_lr`, `mode` ...

    Attributes:
        server: the address for `DiLoCoWorker(server=...)` or DILOCO_SERVER.
        broker: the `diloco_broker.Broker`.

    Raises:
        UsageError: options that cannot work.
    """

    def __init__(self, workers: int = 2, *, patience: float = PATIENCE_S, **options: Any) -> None:
        self._folder = TemporaryDirectory(prefix="diloco-")
        folder = Path(self._folder.name)
        # No worker has an older run: take the first worker's parameters at once.
        is_auto = options.get("mode") == "async" or options.get("fragment_sync_delay") == "auto"
        options = {"recover_wait": 0.0, "deterministic": not is_auto, **options}
        try:
            config = BrokerConfig(
                workers=workers, bind=f"ipc://{folder}/run", feed=f"ipc://{folder}/feed", **options
            )
            self.broker = Broker(config)
        except BaseException:
            self._folder.cleanup()
            raise
        self.server = self.broker.address
        self._patience = patience
        self._turns = Turns(patience, self._why_it_stalls)

    def __enter__(self) -> LocalRun:
        PORTS[self.server] = partial(InTurnPorts, turns=self._turns)
        self.broker.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.broker.stop()
        finally:
            PORTS.pop(self.server, None)
            self._folder.cleanup()

    def global_parameters(self) -> dict[str, Tensor]:
        """The run's parameters as they are now, by the names of `state_dict`.

        Raises:
            Refused: there are none yet.
        """
        with DiLoCoClient(self.server, timeout=self._patience) as client:
            return dict(client.pull().tensors)

    def train(self, function: Callable[[int], T]) -> list[T]:
        """Call `function(0)`, `function(1)`, ... at the same time, each in a thread; one per worker.

        Each makes its model, optimizer and `DiLoCoWorker(server=run.server)`, and trains. All threads
        share torch's random numbers: give each its own `torch.Generator` where order matters.

        Returns:
            Their results, in order.

        Raises:
            Exception: that of the first that failed; the run is stopped then, so the others end.
            RunStalled: no round has closed for `patience` seconds.
        """
        futures = [_in_a_thread(function, number) for number in range(self.broker.config.workers)]
        wait(futures, return_when="FIRST_EXCEPTION")
        failed = next((each for each in futures if each.done() and each.exception()), None)
        if failed is not None:
            self.broker.stop()
            wait(futures, END_WITHIN_S)
            failed.result()
        return [each.result() for each in futures]

    def _why_it_stalls(self) -> str:
        wanted, here = self.broker.config.workers, self._turns.worker_ids
        if len(here) < wanted:
            return f"the run has {wanted} workers and {len(here)} of them are here"
        return f"one of {', '.join(sorted(here))} makes no steps"


def _in_a_thread(function: Callable[[int], T], number: int) -> Future[T]:
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function(number))
        except BaseException as error:  # noqa: BLE001  it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=work, name=f"worker {number}", daemon=True).start()
    return future


# Workers that one thread steps in turn.


@coroutine
def _suspended() -> Generator[None, None, None]:
    yield


@dataclass(eq=False, repr=False, kw_only=True)
class InTurnPorts(LocalPorts):
    """The ports of a worker that is stepped in turn, and its suspended boundary, if any."""

    turns: Turns
    thread: int = 0  # that steps it
    boundary: Coroutine[Any, Any, Any] | None = None
    result: Any = None  # of the last boundary
    suspends: bool = False  # a boundary that waits
    has_warned: bool = False

    def begin(self) -> None:
        # Closing waits no longer than the run may stall.
        timeout = min(self.settings.timeout, 2 * self.turns.patience)
        self.settings = replace(self.settings, timeout=timeout)
        super().begin()
        self.thread = threading.get_ident()
        self.turns.join(self)

    @property
    def is_idle(self) -> bool:
        return False  # the others may have boundaries that can go on

    def run(self, call: str, steps: Callable[[SyncState], Coroutine[Any, Any, T]]) -> T | None:
        """Run a boundary up to where it waits for others of this thread; returns its result."""
        self.thread = threading.get_ident()
        if call == LOAD or self.has_left:
            return super().run(call, steps)
        self.reports.read(self.clock())
        return self.turns.run(self, steps(self.state))

    def leave(self, *, hasty: bool) -> None:
        super().leave(hasty=self.turns.leave(self) or hasty)

    async def wait(self, seconds: float) -> Poll:
        if not self.suspends:
            return await super().wait(seconds)
        await _suspended()
        return self.poll()

    def resume(self) -> None:
        """Run the boundary until it waits, or to its end."""
        assert self.boundary is not None
        self.suspends = True
        try:
            self.boundary.send(None)
        except StopIteration as end:
            self.boundary, self.result = None, end.value
        except BaseException:
            self.boundary = None
            raise
        finally:
            self.suspends = False

    def is_over(self) -> bool:
        """Resume the suspended boundary, if any; whether it has ended."""
        if self.boundary is not None:
            self.resume()
        return self.boundary is None

    def listen(self, seconds: float) -> None:
        """Wait for news of this worker, and handle them. Its errors are handled as in its own step."""
        try:
            self._listen(seconds)
            self.is_over()
        except Exception as error:  # noqa: BLE001  as in its own step
            self.state.schedule.restart(self.state.step)
            self.trouble(f"Synchronising failed: {error!r}")

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

    patience: float  # seconds of waiting before `RunStalled`
    why: Callable[[], str]  # what the run waits for, the end of a sentence
    _workers: list[InTurnPorts] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def worker_ids(self) -> list[str]:
        """Of the workers that are in the run."""
        return [each.state.worker_id for each in self._workers]

    def join(self, worker: InTurnPorts) -> None:
        with self._lock:
            self._workers.append(worker)

    def leave(self, worker: InTurnPorts) -> bool:
        """Forget this worker. Returns whether the thread has others, which wait for nothing then."""
        with self._lock:
            self._workers = [each for each in self._workers if each is not worker]
        if worker.boundary is not None:
            worker.boundary.close()
        return bool(self._of_this_thread())

    def run(self, worker: InTurnPorts, boundary: Coroutine[Any, Any, T]) -> T | None:
        """Run a boundary of this worker, and those of others that can continue then."""
        if not worker.is_over():
            boundary.close()
            self._warn_of_overtaking(worker)
            return None
        worker.boundary, worker.result = boundary, None
        worker.resume()
        self._wait()
        result: T | None = worker.result
        return result

    def _wait(self) -> None:
        """Finish this thread's boundaries that wait for none of its own workers.

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
                raise RunStalled(f"No round has closed for {self.patience:g} s: {self.why()}.")

    def _waiting_for_others(self) -> list[InTurnPorts]:
        """Workers at a boundary for whose round all workers of this thread have pushed."""
        mine = self._of_this_thread()
        return [each for each in mine if each.boundary is not None and not self._yet_to_push(each)]

    def _yet_to_push(self, worker: InTurnPorts) -> list[InTurnPorts]:
        """The workers of its thread that have yet to push for the round that it waits for."""
        round_ = worker.awaited_round
        if round_ is None:
            return []
        return [w for w in self._of_this_thread() if w.state.schedule.cursor <= round_]

    def _of_this_thread(self) -> list[InTurnPorts]:
        here = threading.get_ident()
        with self._lock:
            mine = [each for each in self._workers if each.thread == here]
        return [each for each in mine if not each.link.has_ended]

    def _warn_of_overtaking(self, worker: InTurnPorts) -> None:
        if not worker.has_warned:
            worker.has_warned = True
            names = ", ".join(sorted(each.state.worker_id for each in self._yet_to_push(worker)))
            worker.trouble(
                f"{worker.state.worker_id} makes steps while its round waits for {names}: step the "
                "workers of one thread in turn. These steps are kept on top of the merge."
            )
