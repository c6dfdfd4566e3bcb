"""Data from the broker's work queue: each unit of a data set goes to one worker in each epoch.

    with DiLoCoWorker(model, optimizer) as diloco:
        queue = WorkQueue(diloco, "books", units=len(files), epochs=3, seed=0)
        data = QueuedDataset(queue, read=lambda unit: samples_of(files[unit]))
        for batch in queue.batches(DataLoader(data, batch_size=8, num_workers=2)):
            ...
            optimizer.step()

A unit is done when the contributions with its steps are in the global parameters. Units of a worker
that died, or whose steps were lost, are handed out again. See docs/data.md.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
from torch.utils.data import IterableDataset

from diloco_protocol import UsageError
from diloco_protocol.data.order import unit_of
from diloco_worker.hook import DiLoCoWorker
from diloco_worker.unit_line import HandedOut

logger = logging.getLogger("diloco.worker")

# Seconds between two requests while others have the last units.
ASK_AGAIN_S = 0.2


class WorkQueue:
    """A worker's end of a data set whose units the broker hands out.

    Args:
        diloco: the worker. One without a server gets every unit itself.
        name: of the data set; 1 to 64 printable characters.
        units: K, how many it has, numbered from 0. The same for all workers, as are `epochs` and `seed`.
            A worker may have 4096 ranges of `prefetch` units that are trained on and not counted: make
            units so large that two rounds take far fewer.
        epochs: how often each is trained on; 0: without an end.
        seed: of the order, which differs from epoch to epoch; None: as they are numbered.
        prefetch: units requested at a time. A worker that dies gives back those that it had.

    Raises:
        UsageError: invalid numbers; or the broker hands out no units of this data set. For a queue made
            before its worker has started, `start` raises.
    """

    def __init__(
        self,
        diloco: DiLoCoWorker,
        name: str,
        units: int,
        *,
        epochs: int = 1,
        seed: int | None = 0,
        prefetch: int = 4,
    ) -> None:
        numbers = (("units", units, 1), ("epochs", epochs, 0), ("prefetch", prefetch, 1))
        for what, number, least in numbers:
            if type(number) is not int or number < least:
                raise UsageError(f"{what} is {number!r:.40}; it must be {least} or more.")
        self.name, self.units, self.epochs, self.seed = name, units, epochs, seed
        self._diloco, self._line = diloco, diloco.units
        self._prefetch = prefetch
        self._stock: deque[int] = deque()  # tickets without a reader
        self._read: set[int] = set()  # with a reader, and not trained completely
        self._lock = threading.RLock()
        self._next = 0  # ticket, without a server
        self._forced_at = -1  # optimizer steps at the last boundary for the queue
        self._line.open(name, units, epochs, seed)

    def take(self) -> int | None:
        """Take a unit to train on, as its ticket; None while none is free, or once all are counted."""
        with self._lock:
            if not self._stock:
                self._ask()
            if not self._stock:
                return None
            ticket = self._stock.popleft()
            self._read.add(ticket)
            return ticket

    def unit(self, ticket: int) -> int:
        """The number of the unit of a ticket."""
        return unit_of(ticket, self.units, self.seed)[1]

    def done(self, ticket: int, *, is_last: bool = True) -> None:
        """For custom loops: the coming optimizer step trains on samples of this unit."""
        self._line.note(self.name, ticket, is_last=is_last)
        if is_last:
            self._read.discard(ticket)

    def batches(self, loader: Iterable[Any], ahead: int = 0) -> Iterator[Any]:
        """The batches of a loader of a `QueuedDataset`, until every unit is counted.

        Each is noted as trained with the optimizer step after it. When no unit is free and some do not
        count yet, it makes a boundary, so that those of this worker count, and waits for units of
        workers that die. It ends early once the run is over.

        Args:
            ahead: batches that the loop fetches before it steps with an earlier one.
        """
        while True:
            fetched: deque[list[int]] = deque()
            for marks, batch in loader:
                named = _numbers(marks)
                if all(self._line.is_dropped(self.name, mark >> 1) for mark in named):
                    self._forget(named)
                    continue
                fetched.append(named)
                while len(fetched) > ahead:
                    self._note(fetched.popleft())
                yield batch
            for named in fetched:
                self._note(named)
            for ticket in sorted(self._read):
                if self._line.is_dropped(self.name, ticket):
                    self._forget([ticket << 1 | 1])
                else:
                    self.done(ticket)  # the loader dropped its last samples
            self._line.stepped()
            if not self._goes_on():
                return

    def _note(self, marks: list[int]) -> None:
        for mark in marks:
            self.done(mark >> 1, is_last=bool(mark & 1))

    def _forget(self, marks: list[int]) -> None:
        """Forget units that were dropped; they may be handed out again."""
        for mark in marks:
            self._line.forget(self.name, mark >> 1)
            if mark & 1:
                self._read.discard(mark >> 1)

    def _goes_on(self) -> bool:
        """Wait until there are units again; False when there will be none."""
        pause = threading.Event()
        while not self._line.is_stopped:
            if self._ask().is_over:
                return False
            if self._stock:
                return True
            config, step = self._diloco.config, self._diloco.local_step
            is_due = config is not None and (config.mode == "sync" or step != self._forced_at)
            if is_due and self._diloco.force_sync():
                self._forced_at = step
            pause.wait(ASK_AGAIN_S)
        return False

    def _ask(self) -> HandedOut:
        with self._lock:
            if self._line.is_alone:
                found = self._own()
            else:
                found = self._line.take(
                    self.name, self.units, self.epochs, self.seed, self._prefetch
                )
            self._stock.extend(found.tickets)
            return found

    def _own(self) -> HandedOut:
        """The next units of a worker without a server."""
        stop = self._next + self._prefetch
        if self.epochs:
            stop = min(stop, self.epochs * self.units)
        tickets, self._next = tuple(range(self._next, stop)), stop
        return HandedOut(tickets, not tickets)


class QueuedDataset(IterableDataset[Any]):
    """The samples of a queue's units, for a DataLoader, whose processes ask this one for units.

    Yields pairs: a mark, which identifies the unit of a sample, and the sample. `WorkQueue.batches`
    reads the marks and passes on the rest. The iteration ends when no unit is free.

    Args:
        queue: in the process that trains.
        read: the samples of a unit, given its number. For spawned processes a function of a module.
    """

    def __init__(self, queue: WorkQueue, read: Callable[[int], Iterable[Any]]) -> None:
        self._queue: WorkQueue | None = queue
        self._read = read
        self._process = os.getpid()
        self._key = secrets.token_bytes(32)
        self._size, self._seed = queue.units, queue.seed
        listener = Listener(authkey=self._key, backlog=64)
        self._address = listener.address
        is_over = threading.Event()
        asked = (listener, queue, is_over)
        threading.Thread(target=_listen, args=asked, name="diloco-units", daemon=True).start()
        # The thread refers to the queue, and with it to the model, while processes may ask.
        end = weakref.finalize(self, _end_listening, listener.address, is_over, self._process)
        end.atexit = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_queue": None}  # for spawned processes

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        if self._queue is not None and self._process == os.getpid():
            yield from self._samples(self._queue.take)
            return
        with Client(self._address, authkey=self._key) as connection:
            yield from self._samples(lambda: _ask_parent(connection))

    def _samples(self, take: Callable[[], int | None]) -> Iterator[tuple[int, Any]]:
        while (ticket := take()) is not None:
            samples = iter(self._read(unit_of(ticket, self._size, self._seed)[1]))
            try:
                last = next(samples)
            except StopIteration:
                continue  # a unit without samples is done when the loader ends
            for sample in samples:
                yield ticket << 1, last
                last = sample
            yield ticket << 1 | 1, last


def _ask_parent(connection: Connection[Any, Any]) -> int | None:
    connection.send_bytes(b"take")
    answer = json.loads(connection.recv_bytes())
    if "error" in answer:
        raise UsageError(answer["error"])
    ticket = answer["ticket"]
    return None if ticket is None else int(ticket)


def _listen(listener: Listener, queue: WorkQueue, is_over: threading.Event) -> None:
    """Serve the processes of a loader. They exchange JSON: nothing is unpickled."""
    with listener:
        while not is_over.is_set():
            try:
                connection = listener.accept()
            except (AuthenticationError, EOFError, ConnectionError):
                continue
            except OSError:
                return
            threading.Thread(target=_serve, args=(connection, queue), daemon=True).start()


def _end_listening(address: Any, is_over: threading.Event, process: int) -> None:
    """The data set was deleted. In a forked process only its copy was."""
    if os.getpid() == process:
        is_over.set()
        with contextlib.suppress(OSError):
            Client(address).close()  # wakes the thread


def _serve(connection: Connection[Any, Any], queue: WorkQueue) -> None:
    with connection:
        try:
            while True:
                connection.recv_bytes(16)
                try:
                    answer: dict[str, Any] = {"ticket": queue.take()}
                except UsageError as error:
                    answer = {"error": str(error)}
                connection.send_bytes(json.dumps(answer).encode())
        except (EOFError, OSError):
            return  # its process has ended


def _numbers(marks: Any) -> list[int]:
    if isinstance(marks, torch.Tensor):
        marks = marks.tolist()
    return [int(mark) for mark in marks] if isinstance(marks, list | tuple) else [int(marks)]
