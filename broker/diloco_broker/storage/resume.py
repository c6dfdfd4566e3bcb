"""Continuing a run: which checkpoint, whether it fits the options, and putting its tensors in place."""

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
from diloco_broker.tensors.shadow import SHADOW
from diloco_protocol.chunks import ModelLayout
from diloco_protocol.errors import UsageError

logger = logging.getLogger("diloco.broker")


def newest_checkpoint(
    config: BrokerConfig, *, has_own_optimizer: bool = False, split: Split | None = None
) -> Checkpoint | None:
    """The checkpoint that the configuration says to go on from; None to begin a new run.

    Raises UsageError where one that was asked for by its path cannot be used, or none fits.
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
            raise UsageError(f"--resume {config.resume}: no checkpoint was found there.")
    problems = []
    for path in candidates:
        try:
            found = checkpoint.load(path)
        except NotPermitted as error:
            # An older one does not replace it: the run would go back, and nothing is wrong with this
            # one.
            raise UsageError(
                f"{error} Let this user read it, or name the checkpoint to go on from: --resume PATH."
            ) from None
        except (MemoryError, OSError) as error:
            raise UsageError(
                f"The checkpoint {path} could not be read here: {error!s:.200}. Nothing says that it is "
                "damaged, so no older one is taken; try again, or name one: --resume PATH."
            ) from None
        except Damaged as error:
            problems.append(str(error))
            logger.warning("Skipped a checkpoint: %s", error)
            continue
        _check_fit(config, found, path)
        check_same(config, split, found, path)
        found = replace(found, saved_at=checkpoint.saved_at(path))
        if found.config.get("workers") != config.workers:
            # The operator has set anew how many there should be: departures before do not lower it.
            found = replace(found, record=replace(found.record, left=()))
        return _with_fitting_optimizer(config, found, path, has_own_optimizer)
    if problems:
        raise UsageError(
            f"None of the {len(problems)} checkpoints in {folder} is sound, the newest because "
            f"{problems[0]} Give --fresh to begin a new run, or another --save-dir."
        )
    return None


def check_options(config: BrokerConfig, found: Checkpoint, path: Path) -> None:
    """Could a broker with these options go on from that checkpoint? It needs none of its tensors.

    Raises UsageError with what does not fit.
    """
    _check_fit(config, found, path)
    check_same(config, make_split(config, None), found, path)


def _check_fit(config: BrokerConfig, found: Checkpoint, path: Path) -> None:
    """What cannot change in the middle of a run: how the model is cut."""
    for name in ("num_fragments", "chunk_elements"):
        saved, given = getattr(found, name), getattr(config, name)
        if saved != given:
            raise UsageError(
                f"--{name.replace('_', '-')} is {given}, the checkpoint {path} has {saved}; give the "
                "same, or --resume none to begin a new run."
            )


def _with_fitting_optimizer(
    config: BrokerConfig, found: Checkpoint, path: Path, has_own_optimizer: bool
) -> Checkpoint:
    """The checkpoint without what another outer optimizer remembers, which says nothing to this one."""
    had, has = found.outer, outer_kind(config, has_own_optimizer)
    if had == has:
        return _with_fitting_buffer(config, found, path)
    text = "The outer optimizer was %s in %s and is %s now: it begins without momentum."
    logger.warning(text, had, path, has)
    bare = {
        f: FragmentTensors(each.chunks, {n: s for n, s in each.outer.items() if n == SHADOW})
        for f, each in found.tensors.items()
    }
    return replace(found, tensors=bare)


def _with_fitting_buffer(config: BrokerConfig, found: Checkpoint, path: Path) -> Checkpoint:
    """The checkpoint without gradients that were collected for a mean of another size."""
    saved = found.config
    before = saved.get("dn_buffer")
    if before is None:
        before = usual_buffer(saved.get("mode", ""), saved.get("workers", 1))
    collected = any(DELAYED in each.outer for each in found.tensors.values())
    if before == config.dn_size or not collected:
        return found
    logger.warning(
        f"The buffer of the outer optimizer took {before} gradients in {path} and takes "
        f"{config.dn_size} now (--dn-buffer): those that were in it are left out of the next momentum "
        "step."
    )
    emptied = {
        f: replace(each, outer={name: s for name, s in each.outer.items() if name != DELAYED})
        for f, each in found.tensors.items()
    }
    return replace(found, tensors=emptied)


def next_life(config: BrokerConfig) -> int:
    """The number of this life of the broker: one more than that of any checkpoint in its folder."""
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
    """Put the tensors of a checkpoint in place; returns what the core has to know of it."""
    for fragment in found.tensors:
        put_back(store, fragment, found)
    wires = {fragment: tuple(store.wires(fragment)) for fragment in found.tensors}
    source = f"the checkpoint before round {found.number}"
    return Resumption(source, found.record, layout, wires, title=title(found))


def put_back(store: TensorStore, fragment: int, found: Checkpoint) -> None:
    """Put one fragment back to what a checkpoint has; raises UsageError where its optimizer cannot go
    on."""
    try:
        reply = str(found.config.get("reply_dtype", "fp32"))
        store.put_back(fragment, replace(found.tensors[fragment], reply=reply))
    except (KeyError, ValueError) as error:
        raise UsageError(
            "The outer optimizer that the factory makes cannot go on from the checkpoint's state "
            f"({error}); use the one that wrote it, or --resume none."
        ) from None
