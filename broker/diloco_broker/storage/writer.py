"""Takes checkpoints, and writes them in a thread without blocking the loop.

The thread receives immutable checkpoints and owns no state. A new checkpoint replaces one that is still
waiting, so a slow disk makes checkpoints less frequent, not later.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import asdict

from diloco_broker.core.events import Saved, SaveFailed
from diloco_broker.core.state import RunState
from diloco_broker.core.versions.record import RunRecord
from diloco_broker.storage import checkpoint
from diloco_broker.storage.background import Background
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


class CheckpointWriter(Background[Checkpoint, Saved | SaveFailed]):
    """Writes checkpoints in a thread, which calls `wake` after each.

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
        super().__init__("diloco-saver", self._write, wake, most=1)
        self._lock, self._keep, self._spared = lock, keep, spared

    def _write(self, newest: Checkpoint) -> Saved | SaveFailed:
        number, folder = newest.number, self._lock.folder
        try:
            self._lock.take()
            path = checkpoint.save(folder, newest, self._keep, self._spared())
            return Saved(number, str(path))
        except OSError as error:
            # Without the file name, which differs each time, so that repeated errors are recognised.
            return SaveFailed(number, f"{error.strerror or error} ({folder})")
        except Exception as error:  # noqa: BLE001 - training must continue; the core logs it
            return SaveFailed(number, str(error) or repr(error))
