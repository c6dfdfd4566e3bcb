"""Shared by the callbacks for training frameworks: figures for their logs, an order of the data.

Trainers make the loader before the worker joins, and seed it alike on each machine, so two workers
would train on the same batches. Here each worker shuffles from another seed. Data that is read in
order, or by an iterable data set, is left as it is.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, Sampler

from diloco_protocol import UsageError
from diloco_worker.hook import DiLoCoWorker
from diloco_worker.settings import warn_once

logger = logging.getLogger("diloco.worker")

# The `sync_metrics` that a framework logs.
LOGGED = ("pushes", "bytes_up", "bytes_down", "seconds_waited", "staleness", "unsynced_steps")
# Between the seeds of two workers; larger than any number of epochs, which samplers add to their seed.
SEED_STEP = 1_000_003
SEEDS = 1 << 63
_MARK = "_diloco_reseeded"  # attribute of samplers whose seed was changed


def figures(worker: DiLoCoWorker) -> dict[str, float]:
    """The figures that a framework logs; empty where the worker is in no run."""
    if worker.config is None:
        return {}
    metrics = worker.sync_metrics
    found = {name: metrics[name] for name in LOGGED} | {"round": worker.round}
    if worker.global_loss is not None:
        found["global_loss"] = worker.global_loss
    return {f"diloco/{name}": float(value) for name, value in found.items()}


def report_loss(report: Callable[..., None], loss: object) -> None:
    """Report the loss of a framework's trainer; warn once if it is not a single number.

    Args:
        report: that of a `DiLoCoWorker`.
        loss: any value; a string is read as a number.
    """
    try:
        report(loss=float(loss) if isinstance(loss, str) else loss)
    except (UsageError, ValueError) as error:
        warn_once(f"The broker gets no loss from this training: {error}")


class OwnOrder(Sampler[Any]):
    """A sampler with a generator of this worker, seeded in each epoch from its previous generator."""

    def __init__(self, sampler: Any, offset: int) -> None:
        self.sampler = sampler
        self._generator: torch.Generator | None = sampler.generator  # None: torch's
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
        if name == "sampler":  # an unfinished copy
            raise AttributeError(name)
        return getattr(self.sampler, name)


def give_own_order(loaders: Iterable[object], shard: Callable[[], tuple[int, int]]) -> bool:
    """Shuffle the data of these loaders from seeds of this worker, and log it.

    Args:
        shard: index and count of this worker's share of the data.

    Returns:
        Whether any loader has another order now.
    """
    try:
        index, count = shard()
    except UsageError as error:
        logger.warning("The order of the data is the same for all workers: %s", error)
        return False
    changed = [_reseed(loader, SEED_STEP * index) for loader in loaders]
    if any(changed):
        logger.info(
            "This worker shuffles its data from its own seeds (shard %d of %d); "
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
    """Whether a sampler of this loader draws from another seed now, or already did."""
    sampler = getattr(loader, "sampler", None)
    holder = (
        sampler if isinstance(sampler, BatchSampler) else getattr(loader, "batch_sampler", None)
    )
    has_changed = False
    while holder is not None:  # Accelerate's holds another one, which holds the sampler
        has_changed |= _reseed_sampler_of(holder, offset)
        holder = getattr(holder, "batch_sampler", None)
    return has_changed


def _reseed_sampler_of(holder: Any, offset: int) -> bool:
    sampler = getattr(holder, "sampler", None)
    if isinstance(sampler, OwnOrder) or getattr(sampler, _MARK, False):
        return True
    try:
        for name in ("initial_seed", "seed"):  # Accelerate's, and that of distributed samplers
            seed = inspect.getattr_static(sampler, name, None)
            if isinstance(seed, int) and getattr(sampler, "shuffle", True):
                setattr(sampler, _MARK, True)
                setattr(sampler, name, seed + offset)
                return True
        generator = inspect.getattr_static(sampler, "generator", sampler)
        if generator is None or isinstance(generator, torch.Generator):
            setattr(sampler, "generator", generator)  # noqa: B010  raises where it is read-only
            holder.sampler = OwnOrder(sampler, offset)
            return True
    except (AttributeError, TypeError):  # a frozen dataclass, or a property without a setter
        pass
    return False
