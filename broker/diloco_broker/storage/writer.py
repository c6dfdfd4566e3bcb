"""Between the broker and its checkpoints: making images, writing them aside, going on from one.

The thread is handed finished, immutable images and owns no state. The newest image wins: one that comes
while an older one waits takes its place, so a slow disk makes checkpoints rarer, never later.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from diloco_broker.config import BrokerConfig
from diloco_broker.core.state.model_source import Resumption
from diloco_broker.core.state.run import RunState
from diloco_broker.core.state.run_record import FragmentRecord, RunRecord
from diloco_broker.storage import checkpoint
from diloco_broker.storage.checkpoint import Damaged, FragmentImage, Image, NotPermitted
from diloco_broker.storage.folder_lock import FolderLock
from diloco_broker.storage.own_plan import Split, check_same
from diloco_broker.tensors.outer.torch_optim import DELAYED
from diloco_protocol.chunks import ModelLayout
from diloco_protocol.errors import UsageError

logger = logging.getLogger("diloco.broker")


class SavedTensors(Protocol):
    """What has tensors that a checkpoint takes and puts back: `Parameters`, or a test's stand-in."""

    def masters(self, fragment: int) -> Sequence[Any]: ...
    def outer_state(self, fragment: int) -> Mapping[str, Sequence[Any]]: ...
    def optimizer_state(self, fragment: int) -> Mapping[str, Any] | None: ...
    def wires(self, fragment: int) -> Sequence[Any]: ...
    def restore(
        self, fragment: int, masters: Any, outer_state: Any, optimizer_state: Any = None
    ) -> None: ...


def newest_image(
    config: BrokerConfig, *, has_own_optimizer: bool = False, split: Split | None = None
) -> Image | None:
    """The checkpoint that the configuration says to go on from; None to begin afresh.

    Args:
        split: the user's own split of the model, if there is one.

    Raises:
        UsageError: a checkpoint that was asked for by its path cannot be used, or none fits.
    """
    if config.resume == "none":
        return None
    if config.resume == "auto":
        folder = None if config.save_dir is None else Path(config.save_dir)
        candidates = [] if folder is None else checkpoint.at(folder)
    else:
        folder = Path(config.resume)
        candidates = checkpoint.at(folder)
        if not candidates:
            raise UsageError(f"--resume {config.resume}: there is no checkpoint at that place.")
    problems = []
    for path in candidates:
        try:
            image = checkpoint.load(path)
        except NotPermitted as error:
            # An older one is no replacement: the run would go back, and nothing is wrong with this one.
            raise UsageError(
                f"{error} Let this user read it, or name the checkpoint to go on from: --resume PATH."
            ) from None
        except Damaged as error:
            problems.append(str(error))
            logger.warning("Skipped a checkpoint: %s", error)
            continue
        _check_fit(config, image, path)
        check_same(config, split, image, path)
        return _with_fitting_optimizer(config, image, path, has_own_optimizer)
    if problems:
        raise UsageError(
            f"None of the {len(problems)} checkpoints in {folder} is sound, the newest because "
            f"{problems[0]} Give --resume none to begin afresh, or another --save-dir."
        )
    return None


def _check_fit(config: BrokerConfig, image: Image, path: Path) -> None:
    """What cannot change in the middle of a run: how the model is cut."""
    for name in ("num_fragments", "chunk_elements"):
        saved, given = getattr(image, name), getattr(config, name)
        if saved != given:
            raise UsageError(
                f"--{name.replace('_', '-')} is {given}, the checkpoint {path} has {saved}; give the "
                "same, or --resume none to begin afresh."
            )


def _with_fitting_optimizer(
    config: BrokerConfig, image: Image, path: Path, has_own_optimizer: bool
) -> Image:
    """The image without what another outer optimizer remembers, which says nothing to this one."""
    had, has = image.outer, outer_kind(config, has_own_optimizer)
    if had == has:
        return _with_fitting_buffer(config, image, path)
    logger.warning(
        "The outer optimizer was %s in %s and is %s now: it begins without momentum.",
        had,
        path,
        has,
    )
    bare = {f: replace(each, outer={}, optimizer=None) for f, each in image.fragments.items()}
    return replace(image, fragments=bare)


def _with_fitting_buffer(config: BrokerConfig, image: Image, path: Path) -> Image:
    """The image without gradients that were collected for a mean of another size."""
    saved = image.config
    before = saved.get("dn_buffer")
    if before is None:
        before = saved.get("workers", 1) if saved.get("mode") == "async" else 1
    collected = any(DELAYED in each.outer for each in image.fragments.values())
    if before == config.dn_size or not collected:
        return image
    logger.warning(
        "The buffer of the outer optimizer took %d gradients in %s and takes %d now (--dn-buffer): "
        "those that were in it are left out of the next momentum step.",
        before,
        path,
        config.dn_size,
    )
    emptied = {
        f: replace(each, outer={n: state for n, state in each.outer.items() if n != DELAYED})
        for f, each in image.fragments.items()
    }
    return replace(image, fragments=emptied)


def outer_kind(config: BrokerConfig, has_own_optimizer: bool) -> str:
    """Which state the outer optimizer has: that of another kind is of no use to it."""
    kind = config.outer_name
    if kind == "dn":
        kind += f" {config.dn_variant}"
    return f"{config.outer or ''} torch".strip() if has_own_optimizer else kind


def next_life(config: BrokerConfig) -> int:
    """The number of this life of the broker: one more than that of any checkpoint in its folder."""
    if config.save_dir is None:
        return 1
    return 1 + max((checkpoint.life_of(p) for p in checkpoint.at(Path(config.save_dir))), default=0)


def take_up(
    image: Image, layout: ModelLayout, parameters: SavedTensors, config: BrokerConfig, source: str
) -> Resumption:
    """Put the tensors of an image in place; returns what the core has to know of it."""
    wires = {}
    for fragment, each in image.fragments.items():
        restore(parameters, fragment, each)
        wires[fragment] = tuple(parameters.wires(fragment))
    return Resumption(source, record_of(image), layout, wires)


def record_of(image: Image) -> RunRecord:
    """All of an image but the tensors."""
    fragments = {
        fragment: FragmentRecord(
            each.version, each.ledger, each.gradients, each.round, each.averaged, each.tags
        )
        for fragment, each in image.fragments.items()
    }
    return RunRecord(
        image.run,
        image.number,
        image.epoch,
        image.manifest,
        image.plan,
        fragments,
        image.workers,
        image.totals,
    )


def restore(parameters: SavedTensors, fragment: int, image: FragmentImage) -> None:
    """Put one fragment back to what an image has."""
    optimizer = None if image.optimizer is None else dict(image.optimizer)
    try:
        parameters.restore(fragment, image.chunks, image.outer, optimizer)
    except (KeyError, ValueError) as error:
        raise UsageError(
            "The outer optimizer that the factory makes cannot go on from the checkpoint's state "
            f"({error}); use the one that wrote it, or --resume none."
        ) from None


def image_of(state: RunState, parameters: SavedTensors, record: RunRecord, life: int) -> Image:
    """The tensors that belong to these record. Only references are taken: nothing is written again."""
    fragments = {
        fragment: FragmentImage(
            **vars(each),
            chunks=[_there(chunk) for chunk in parameters.masters(fragment)],
            outer=parameters.outer_state(fragment),
            optimizer=parameters.optimizer_state(fragment),
        )
        for fragment, each in record.fragments.items()
    }
    return Image(
        run=record.run,
        number=record.number,
        life=life,
        manifest=record.manifest,
        plan=record.plan,
        num_fragments=state.config.num_fragments,
        chunk_elements=state.config.chunk_elements,
        outer=outer_kind(state.config, state.has_own_optimizer),
        fragments=fragments,
        epoch=record.epoch,
        workers=record.workers,
        config=asdict(state.config) | {"fragment_pattern": state.fragment_pattern},
        totals=record.totals,
    )


def _there(chunk: Tensor | None) -> Tensor:
    assert chunk is not None, "a version has a chunk without a value"
    return chunk


@dataclass(frozen=True)
class Outcome:
    """What became of one save: `error` is None when the checkpoint is on the disk."""

    number: int
    path: Path | None
    error: str | None


class Saver:
    """See the head of this module.

    Args:
        lock: of the folder where checkpoints go; made when the first one is written.
        keep: how many are kept.
        wake: called by the thread when there is an outcome.

    Attributes:
        outcomes: what has been done, the oldest first; the loop takes them from the left.
    """

    def __init__(self, lock: FolderLock, keep: int, wake: Callable[[], None]) -> None:
        self.folder = lock.folder
        self._lock = lock
        self._wake = wake
        self.outcomes: deque[Outcome] = deque()
        self._keep = keep
        self._changed = threading.Condition()
        self._next: Image | None = None
        self._is_busy = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def save(self, image: Image) -> None:
        """Write this image as soon as the one at hand is done. Returns at once."""
        with self._changed:
            self._next = image
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="diloco-saver", daemon=True)
            self._thread.start()

    def finish(self, timeout: float) -> bool:
        """Wait until everything is written, at most so many seconds; False when it is not."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next is None and not self._is_busy, timeout)

    def close(self) -> None:
        """End the thread once it has written what it is at."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._is_closed)
                image, self._next = self._next, None
                if image is None:
                    return
                self._is_busy = True
            outcome = self._write(image)
            del image  # its chunks must not live until the next one comes
            with self._changed:
                self.outcomes.append(outcome)
                self._is_busy = False
                self._changed.notify_all()
            self._wake()

    def _write(self, image: Image) -> Outcome:
        try:
            self._lock.take()
            return Outcome(image.number, checkpoint.save(self.folder, image, self._keep), None)
        except OSError as error:
            # Without the name of the file, which is another one each time: what is wrong is the same.
            return Outcome(image.number, None, f"{error.strerror or error} ({self.folder})")
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on and says so
            return Outcome(image.number, None, str(error) or repr(error))
