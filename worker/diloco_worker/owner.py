"""Which model optimizers train, where the script does not say so: found in the memory of a process."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TypeVar

from torch import nn
from torch.optim import Optimizer

from diloco_protocol import UsageError
from diloco_worker.pair import HOOKS

T = TypeVar("T")

BY_HAND = "Put a DiLoCoWorker into the script instead; worker/README.md says how."
# Wrappers that exchange gradients among the processes of one training, by the names of their classes.
OF_SEVERAL_PROCESSES = ("DistributedDataParallel", "FullyShardedDataParallel")


def living_modules() -> list[nn.Module]:
    """All modules of this process that something refers to."""
    return _living(nn.Module)


def living_optimizers() -> list[Optimizer]:
    """All optimizers of this process that something refers to, but for wrappers of others."""
    return [found for found in _living(Optimizer) if HOOKS in vars(found)]


def _living(kind: type[T]) -> list[T]:
    gc.collect()
    # By type: `isinstance` asks the object, and lazy ones load what they stand for.
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def parameters_of(*optimizers: Optimizer) -> set[int]:
    """The `id` of each parameter that they train."""
    return {
        id(parameter)
        for each in optimizers
        for group in each.param_groups
        for parameter in group["params"]
    }


def owner_of(optimizer: Optimizer, modules: Iterable[nn.Module], *others: Optimizer) -> nn.Module:
    """The outermost module that holds every parameter of the optimizer, and of the others.

    Where several do that are not parts of each other, such as two wrappers of one model, it is the
    outermost that is a part of all of them.

    Raises:
        UsageError: there is none, there are several, or its processes train it together; a sentence.
    """
    wanted = parameters_of(optimizer, *others)
    kind = type(optimizer).__name__
    made = [module for module in modules if "_parameters" in vars(module)]  # its __init__ has run
    holders = [module for module in made if wanted <= _parameters(module)]
    if not wanted or not holders:
        raise UsageError(f"No module holds all {len(wanted)} parameters of {kind}. {BY_HAND}")
    outermost = _outermost(holders)
    if len(outermost) > 1:
        shared = set.intersection(*({id(part) for part in each.modules()} for each in outermost))
        common = _outermost([holder for holder in holders if id(holder) in shared])
        if len(common) != 1:
            names = ", ".join(sorted(type(each).__name__ for each in outermost)[:5])
            raise UsageError(
                f"{len(outermost)} models hold the parameters of {kind}, and none is a part of the "
                f"others: {names}. {BY_HAND}"
            )
        outermost = common
    for each in holders:
        if type(each).__name__ in OF_SEVERAL_PROCESSES:
            raise UsageError(
                f"The model is wrapped in {type(each).__name__}: several processes train it together. "
                f"{BY_HAND}"
            )
    return outermost[0]


def _parameters(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in nn.Module.parameters(module)}


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    parts = {id(part) for each in modules for part in each.modules() if part is not each}
    return [each for each in modules if id(each) not in parts]
