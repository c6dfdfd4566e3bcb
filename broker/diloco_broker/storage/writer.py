"""Takes checkpoints, and writes them in a thread without blocking the loop.

The thread receives immutable checkpoints and owns no state. A new checkpoint replaces one that is still
waiting, so a slow disk makes checkpoints less frequent, not later.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container
from dataclasses import asdict

from diloco_broker.core.events import Saved, SaveFailed
from diloco_broker.core.state import RunState
from diloco_broker.core.versions.record import RunRecord
from diloco_broker.storage import checkpoint
from diloco_broker.storage.checkpoint_format import Checkpoint, TensorStore
from diloco_broker.storage.folder_lock import FolderLock
from diloco_broker.tensors.outer.make import outer_kind


def checkpoint_of(
    state: RunState, store: TensorStore, record: RunRecord, incarnation: int
) -> Checkpoint:
    """Combine a record and its tensors into a checkpoint, without copying: the tensors never change."""
    config = state.config
    return Checkpoint(
        record=record,
        incarnation=incarnation,
        num_fragments=config.num_fragments,
        chunk_elements=config.chunk_elements,
        outer=outer_kind(config, state.has_own_optimizer),
        config=asdict(config) | {"fragment_pattern": state.fragment_pattern},
        tensors={fragment: store.fragment_tensors(fragment) for fragment in record.fragments},
    )


class CheckpointWriter:
    """Writes checkpoints in a thread, which calls `wake` after adding to `results`.

    The folder of `lock` is created with the first checkpoint; it keeps the newest `keep` checkpoints,
    and those that `spared` names.
    """

    def __init__(
        self,
        lock: FolderLock,
        keep: int,
        wake: Callable[[], None],
        spared: Callable[[], Container[str]] = frozenset,
    ) -> None:
        self.folder = lock.folder
        self._lock = lock
        self._wake = wake
        self.results: deque[Saved | SaveFailed] = deque()
        self._keep, self._spared = keep, spared
        self._changed = threading.Condition()
        self._next: Checkpoint | None = None
        self._is_busy = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Write this checkpoint after the one in progress. Returns at once."""
        with self._changed:
            self._next = checkpoint
            self._changed.notify_all()
        if self._thread is None:
            thread = threading.Thread(target=self._main, name="diloco-saver", daemon=True)
            thread.start()
            self._thread = (
                thread  # set only after a successful start, so that the next save retries
            )

    def finish(self, timeout: float) -> bool:
        """Wait until everything is written, at most `timeout` seconds; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next is None and not self._is_busy, timeout)

    def close(self) -> None:
        """Stop the thread after pending writes."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._is_closed)
                newest, self._next = self._next, None
                if newest is None:
                    return
                self._is_busy = True
            result = self._write(newest)
            del newest  # free its chunks before the next save
            with self._changed:
                self.results.append(result)
                self._is_busy = False
                self._changed.notify_all()
            self._wake()

    def _write(self, newest: Checkpoint) -> Saved | SaveFailed:
        number = newest.number
        try:
            self._lock.take()
            path = checkpoint.save(self.folder, newest, self._keep, self._spared())
            return Saved(number, str(path))
        except OSError as error:
            # Without the file name, which differs each time, so that repeated errors are recognised.
            return SaveFailed(number, f"{error.strerror or error} ({self.folder})")
        except Exception as error:  # noqa: BLE001 - training must continue; the core logs it
            return SaveFailed(number, str(error) or repr(error))
