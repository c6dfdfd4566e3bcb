"""What the callbacks for training frameworks share: figures for their logs, an order of the data.

Other people's trainers make the loader before the worker joins, and seed it alike on each machine, so
two workers would train on the same batches, as one. Here each worker shuffles from another seed. Data
that is read in order, or by an iterable data set, is left as it is.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, Sampler

from diloco_protocol import UsageError
from diloco_worker.hook import DiLoCoWorker
from diloco_worker.settings import warn_once

logger = logging.getLogger("diloco.worker")

# Of `sync_metrics`, what a framework logs.
LOGGED = ("pushes", "bytes_up", "bytes_down", "seconds_waited", "staleness", "unsynced_steps")
# Between the seeds of two workers. Samplers add the epoch to their seed, so it is larger than any number
# of epochs: no two workers have the same order in different epochs.
SEED_STEP = 1_000_003
SEEDS = 1 << 63


def figures(worker: DiLoCoWorker) -> dict[str, float]:
    """What a framework's logs get of a run; nothing where the worker is in none."""
    if worker.config is None:
        return {}
    metrics = worker.sync_metrics
    found = {name: metrics[name] for name in LOGGED} | {"round": worker.round}
    if worker.global_loss is not None:
        found["global_loss"] = worker.global_loss
    return {f"diloco/{name}": float(value) for name, value in found.items()}


def report_loss(report: Callable[..., None], loss: object) -> None:
    """Report the loss that a framework's trainer gives; warn once if it is not a single number.

    Args:
        report: that of a `DiLoCoWorker`.
        loss: any value; a string is read as a number.
    """
    try:
        report(loss=float(loss) if isinstance(loss, str) else loss)
    except (UsageError, ValueError) as error:
        warn_once(f"The broker gets no loss from this training: {error}")


class OwnOrder(Sampler[Any]):
    """A sampler with a generator of this worker's, seeded in each epoch from the one that it had."""

    def __init__(self, sampler: Any, offset: int) -> None:
        self.sampler = sampler
        self._generator: torch.Generator | None = sampler.generator  # None: that of torch
        self._offset = offset

    def __iter__(self) -> Iterator[Any]:
        device = torch.device("cpu") if self._generator is None else self._generator.device
        drawn = torch.empty((), dtype=torch.int64, device=device).random_(generator=self._generator)
        own = torch.Generator(device)
        own.manual_seed((int(drawn) + self._offset) % SEEDS)
        self.sampler.generator = own
        try:
            yield from self.sampler
        finally:
            self.sampler.generator = self._generator

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.sampler, name)


def give_own_order(loaders: Iterable[object], shard: Callable[[], tuple[int, int]]) -> bool:
    """Shuffle what these loaders give from seeds of this worker's, and say so in the log.

    Args:
        shard: index and count of this worker's share of the data.

    Returns:
        Whether any loader gives another order now.
    """
    try:
        index, count = shard()
    except UsageError as error:
        logger.warning("The order of the data is the same for all workers: %s", error)
        return False
    changed = [_reseed(loader, SEED_STEP * index) for loader in loaders]
    if any(changed):
        logger.info(
            "This worker shuffles its data from seeds of its own (shard %d of %d); "
            "shard_data=False leaves the seeds alone.",
            index,
            count,
        )
    elif count > 1:
        logger.warning(
            "No sampler shuffles the training data from a seed or a torch.Generator that can be "
            "replaced, so all workers may read the same: give this one (shard %d of %d) its own part of "
            "the data (docs/data.md), then set shard_data=False.",
            index,
            count,
        )
    return any(changed)


def _reseed(loader: object, offset: int) -> bool:
    """Whether the sampler of this loader draws from another seed now, or has done so before."""
    sampler = getattr(loader, "sampler", None)
    holder: Any = (
        sampler if isinstance(sampler, BatchSampler) else getattr(loader, "batch_sampler", None)
    )
    has_changed = False
    while holder is not None:  # Accelerate's holds another one, which holds the sampler
        sampler = getattr(holder, "sampler", None)
        if isinstance(sampler, OwnOrder) or _reseeded.get(id(sampler), _reseeded) is sampler:
            has_changed = True
        elif (name := _seed_of(sampler)) is not None:
            setattr(sampler, name, getattr(sampler, name) + offset)
            _reseeded[id(sampler)] = sampler
            has_changed = True
        elif _has_a_generator(sampler) and _is_assignable(holder, "sampler"):
            holder.sampler = OwnOrder(sampler, offset)
            has_changed = True
        holder = getattr(holder, "batch_sampler", None)
    return has_changed


# Samplers whose seed was changed, by id: a sampler may be unhashable, as a dataclass is.
_reseeded: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _seed_of(sampler: object) -> str | None:
    """The attribute that a sampler seeds each epoch with: Accelerate's, or that of distributed ones."""
    if getattr(sampler, "shuffle", True) and getattr(type(sampler), "__weakrefoffset__", 0):
        for name in ("initial_seed", "seed"):
            is_seed = isinstance(inspect.getattr_static(sampler, name, None), int)
            if is_seed and _is_assignable(sampler, name):
                return name
    return None


def _has_a_generator(sampler: object) -> bool:
    """Whether it draws from an attribute that can hold a torch.Generator, as torch's own samplers do."""
    found = inspect.getattr_static(sampler, "generator", sampler)
    return (found is None or isinstance(found, torch.Generator)) and _is_assignable(
        sampler, "generator"
    )


def _is_assignable(holder: object, name: str) -> bool:
    """False for the attributes of a frozen dataclass, and for properties without a setter."""
    try:
        setattr(holder, name, getattr(holder, name))
    except (AttributeError, TypeError):
        return False
    return True
