"""Resumes a run: selects a checkpoint, checks that it fits the options, and restores its tensors."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

from diloco_broker.config import BrokerConfig
from diloco_broker.config.declaration import usual_buffer
from diloco_broker.core.versions.record import Resumption
from diloco_broker.storage import checkpoint
from diloco_broker.storage.checkpoint import Damaged, NotPermitted
from diloco_broker.storage.checkpoint_format import Checkpoint, TensorStore
from diloco_broker.storage.own_plan import Split, check_same, make_split
from diloco_broker.tensors.outer.chunked import DELAYED
from diloco_broker.tensors.outer.make import outer_kind
from diloco_broker.tensors.parameters import FragmentTensors
from diloco_broker.tensors.replica import REPLICA
from diloco_protocol.chunks import ModelLayout
from diloco_protocol.errors import UsageError

logger = logging.getLogger("diloco.broker")


def newest_checkpoint(
    config: BrokerConfig, *, has_own_optimizer: bool = False, split: Split | None = None
) -> Checkpoint | None:
    """The checkpoint to resume from; None to start a new run.

    Raises UsageError if a checkpoint given by its path cannot be used, or no checkpoint can.
    """
    if config.resume == "none" or config.fresh:
        return None
    if config.resume == "auto":
        folder = None if config.save_dir is None else Path(config.save_dir)
        candidates = [] if folder is None else checkpoint.at(folder)
    else:
        folder = Path(config.resume)
        candidates = checkpoint.at(folder)
        if not candidates:
            raise UsageError(f"--resume {config.resume} has no checkpoint.")
    problems = []
    for path in candidates:
        try:
            found = checkpoint.load(path)
        except NotPermitted as error:
            # Do not fall back to an older one: the run would lose rounds, and this one may be intact.
            raise UsageError(
                f"{error} Make it readable for this user, or name a checkpoint: --resume PATH."
            ) from None
        except (MemoryError, OSError) as error:
            raise UsageError(
                f"Cannot read the checkpoint {path} on this machine: {error!s:.200}. It may be intact, "
                "so no older one is used; retry, or name a checkpoint: --resume PATH."
            ) from None
        except Damaged as error:
            problems.append(str(error))
            logger.warning("Skipped a checkpoint: %s", error)
            continue
        _check_fit(config, found, path)
        check_same(config, split, found, path)
        found = replace(found, saved_at=checkpoint.saved_at(path))
        if found.config.get("workers") != config.workers:
            # The operator changed the number of workers: earlier departures no longer reduce it.
            found = replace(found, record=replace(found.record, left=()))
        return _with_fitting_optimizer(config, found, path, has_own_optimizer)
    if problems:
        raise UsageError(
            f"All {len(problems)} checkpoints in {folder} are unusable, the newest because "
            f"{problems[0]} Give --fresh to start a new run, or another --save-dir."
        )
    return None


def check_options(config: BrokerConfig, found: Checkpoint, path: Path) -> None:
    """Check that a broker with these options could resume from a checkpoint, whose tensors it ignores.

    Raises UsageError that names the conflict.
    """
    _check_fit(config, found, path)
    check_same(config, make_split(config, None), found, path)


def _check_fit(config: BrokerConfig, found: Checkpoint, path: Path) -> None:
    """Check the options that cannot change during a run: how the model is split."""
    for name in ("num_fragments", "chunk_elements"):
        saved, given = getattr(found, name), getattr(config, name)
        if saved != given:
            raise UsageError(
                f"--{name.replace('_', '-')} is {given}, the checkpoint {path} has {saved}; give the "
                "same, or --resume none to start a new run."
            )


def _with_fitting_optimizer(
    config: BrokerConfig, found: Checkpoint, path: Path, has_own_optimizer: bool
) -> Checkpoint:
    """The checkpoint without the outer optimizer's state if another optimizer wrote it."""
    had, has = found.outer, outer_kind(config, has_own_optimizer)
    if had == has:
        return _with_fitting_buffer(config, found, path)
    text = "The outer optimizer was %s in %s and is %s now: it starts without momentum."
    logger.warning(text, had, path, has)
    bare = {
        f: FragmentTensors(each.chunks, {n: s for n, s in each.outer.items() if n == REPLICA})
        for f, each in found.tensors.items()
    }
    return replace(found, tensors=bare)


def _with_fitting_buffer(config: BrokerConfig, found: Checkpoint, path: Path) -> Checkpoint:
    """The checkpoint without buffered gradients if the size of that buffer has changed."""
    saved = found.config
    before = saved.get("dn_buffer")
    if before is None:
        before = usual_buffer(saved.get("mode", ""), saved.get("workers", 1))
    collected = any(DELAYED in each.outer for each in found.tensors.values())
    if before == config.dn_size or not collected:
        return found
    logger.warning(
        f"The buffer of the outer optimizer had {before} gradients in {path} and has "
        f"{config.dn_size} now (--dn-buffer): the next momentum step leaves out those that were in it."
    )
    emptied = {
        f: replace(each, outer={name: s for name, s in each.outer.items() if name != DELAYED})
        for f, each in found.tensors.items()
    }
    return replace(found, tensors=emptied)


def next_incarnation(config: BrokerConfig) -> int:
    """The number of this incarnation: one more than that of any checkpoint in the folder."""
    if config.save_dir is None:
        return 1
    return 1 + max((checkpoint.life_of(p) for p in checkpoint.at(Path(config.save_dir))), default=0)


def title(found: Checkpoint) -> str:
    """The run of a checkpoint, for people: "the run of 2026-11-24 14:03, 117 rounds"."""
    unit = "version" if found.config.get("mode") == "async" else "round"
    made = f"{found.number} {unit}{'s'[: found.number != 1]}"
    if found.saved_at is None:
        return f"the run of {made}"
    return f"the run of {time.strftime('%Y-%m-%d %H:%M', time.localtime(found.saved_at))}, {made}"


def load_into(store: TensorStore, found: Checkpoint, layout: ModelLayout) -> Resumption:
    """Restore the tensors of a checkpoint; returns the core's part of it."""
    for fragment in found.tensors:
        put_back(store, fragment, found)
    wires = {fragment: tuple(store.wires(fragment)) for fragment in found.tensors}
    source = f"the checkpoint before round {found.number}"
    return Resumption(source, found.record, layout, wires, title=title(found))


def put_back(store: TensorStore, fragment: int, found: Checkpoint) -> None:
    """Restore one fragment from a checkpoint.

    Raises UsageError if the outer optimizer cannot continue from its state.
    """
    try:
        reply = str(found.config.get("reply_dtype", "fp32"))
        store.put_back(fragment, replace(found.tensors[fragment], reply=reply))
    except (KeyError, ValueError) as error:
        raise UsageError(
            "The outer optimizer of the factory cannot continue from the checkpoint's state "
            f"({error}); use the one that wrote it, or --resume none."
        ) from None
