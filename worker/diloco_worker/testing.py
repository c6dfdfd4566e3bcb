"""A whole run inside one process, without a network: for the tests of a training script.

    with LocalRun(workers=2, sync_every=4) as run:
        one = DiLoCoWorker(model, optimizer, server=run.server)
        ...

The broker and the workers are the real ones; they speak over files of a temporary folder (Unix domain
sockets). Workers may be stepped in turn by one thread (`in_turn`), or each by its own thread
(`LocalRun.train`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from torch import Tensor

from diloco_broker import Broker, BrokerConfig
from diloco_protocol.errors import UsageError
from diloco_worker.client import DiLoCoClient
from diloco_worker.in_turn import RUNS, RunStandsStill, Turns

__all__ = ["LocalRun", "RunStandsStill"]

T = TypeVar("T")

PATIENCE_S = 30.0
# For the others to end when a worker of `LocalRun.train` has failed. One that is about to join waits for
# a broker as ever, and nobody waits for its thread.
END_WITHIN_S = 5.0


class LocalRun:
    """A broker in a thread of this process. A context manager.

    Args:
        workers: how many take part; the first round waits for all of them.
        patience: seconds after which a wait for a round ends with `RunStandsStill`.
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
        # Nobody can be on the way with an older run: the first worker's parameters are taken at once.
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
        self._turns = Turns(patience, self._why_it_stands)

    def __enter__(self) -> LocalRun:
        RUNS[self.server] = self._turns
        self.broker.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.broker.stop()
        finally:
            RUNS.pop(self.server, None)
            self._folder.cleanup()

    def global_parameters(self) -> dict[str, Tensor]:
        """The run's parameters as they are now, by the names of `state_dict`.

        Raises:
            Refused: there are none yet.
        """
        with DiLoCoClient(self.server, timeout=self._patience) as client:
            return dict(client.pull().tensors)

    def train(self, function: Callable[[int], T], workers: int | None = None) -> list[T]:
        """Call `function(0)`, `function(1)`, ... at the same time, each in a thread; one per worker.

        Each makes its model, optimizer and `DiLoCoWorker(server=run.server)`, and trains. Dice of torch
        are common to all threads: give each its own `torch.Generator` where order matters.

        Returns:
            What they have returned, in order.

        Raises:
            Exception: that of the first that failed; the run is stopped then, so the others end.
            RunStandsStill: no round has closed for `patience` seconds.
        """
        count = self.broker.config.workers if workers is None else workers
        if count < 1:
            raise UsageError(f"workers is {count}; it must be 1 or more.")
        futures = [_in_a_thread(function, number) for number in range(count)]
        wait(futures, return_when="FIRST_EXCEPTION")
        failed = next((each for each in futures if each.done() and each.exception()), None)
        if failed is not None:
            self.broker.stop()
            wait(futures, END_WITHIN_S)
            failed.result()
        return [each.result() for each in futures]

    def _why_it_stands(self) -> str:
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
