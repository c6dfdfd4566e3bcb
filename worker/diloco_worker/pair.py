"""Checks of the model and the optimizers that a worker is made with: they fit, and are in no run yet.

A model is in a run with one DiLoCoWorker at a time. Two would deadlock: the thread that waits for the
round of one makes no step for the other. It happens where a notebook's cell is run again.
"""

from __future__ import annotations

import os
import weakref

from torch import nn
from torch.optim import Optimizer

from diloco_protocol import UsageError
from diloco_worker.counted_steps import parameters_of
from diloco_worker.model.model_manifest import unwrapped
from diloco_worker.model.wrappers import parts_of

# Optimizers around optimizers, at most.
DEEPEST = 10
# Modules of other libraries whose optimizers pass their steps to DeepSpeed.
DEEPSPEED_WRAPPERS = {"accelerate.utils.deepspeed"}
# Where torch keeps what `register_step_post_hook` was given; made by `Optimizer.__init__`.
HOOKS = "_optimizer_step_post_hooks"


def check_pair(model: object, optimizer: object) -> tuple[nn.Module, tuple[Optimizer, ...]]:
    """The model, and the optimizers whose steps can be counted: these, or those that they wrap.

    Either may be a list. Raises UsageError unless each optimizer trains this model.
    """
    optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    refuse_deepspeed(model, *optimizers)
    if not isinstance(model, list | tuple | nn.Module):
        raise UsageError(
            f"model is a {type(model).__name__}; it must be a torch.nn.Module, or a list of its parts."
        )
    module = model if isinstance(model, nn.Module) else unwrapped(model)
    parameters = list(module.parameters())
    ours = {id(parameter) for parameter in parameters}
    counted: list[Optimizer] = []
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise UsageError(
                f"optimizer is a {type(each).__name__}; it must be a torch.optim.Optimizer, or a list "
                "of them."
            )
        inner = _with_hooks(each)
        is_unrelated = ours.isdisjoint(parameters_of(each))
        if is_unrelated and any(parameter.requires_grad for parameter in parameters):
            raise UsageError(
                f"The optimizer ({type(each).__name__}) holds none of the model's parameters; make it "
                "from model.parameters(), after the model has been moved or wrapped."
            )
        if all(inner is not known for known in counted):
            counted.append(inner)
    if not counted:
        raise UsageError("optimizer is an empty list; give those that train the model.")
    return module, tuple(counted)


def refuse_deepspeed(*given: object) -> None:
    """Raise UsageError for objects of DeepSpeed: its steps call no step hook of torch."""
    for each in given:
        inner = each
        for _ in range(DEEPEST):
            modules = {base.__module__ for base in type(inner).__mro__}
            if any(m.split(".")[0] == "deepspeed" or m in DEEPSPEED_WRAPPERS for m in modules):
                raise UsageError(
                    f"{type(each).__name__} belongs to DeepSpeed, which keeps gradients and steps in "
                    "its own buffers; train with a torch.optim.Optimizer, without DeepSpeed."
                )
            inner = vars(inner).get("optimizer") if hasattr(inner, "__dict__") else None


def _with_hooks(optimizer: Optimizer) -> Optimizer:
    """The first with its own step hooks, from the outermost wrapper inwards.

    Wrappers like Accelerate's are an Optimizer by type, pass each real step to `.optimizer`, and never
    call `Optimizer.__init__`.
    """
    inner: object = optimizer
    for _ in range(DEEPEST):
        if isinstance(inner, Optimizer) and HOOKS in vars(inner):
            return inner
        inner = getattr(inner, "optimizer", None)
    raise UsageError(
        f"optimizer is a {type(optimizer).__name__}, which has no step hooks and wraps no optimizer "
        "that has; give the torch.optim.Optimizer that makes the steps."
    )


# Of each module in a run, the `id` of its DiLoCoWorker, that worker's own id, and their process.
_occupants: weakref.WeakKeyDictionary[nn.Module, tuple[int, str, int]] = weakref.WeakKeyDictionary()


def check_free(model: nn.Module) -> None:
    """Raise UsageError if a worker of this process is in a run with this model, or a part of it."""
    for part in parts_of(unwrapped(model)):
        _, worker_id, pid = _occupants.get(part, (0, "", 0))
        if pid == os.getpid():
            raise UsageError(
                f"This model is in a run already, as worker {worker_id!r}; close() that DiLoCoWorker "
                "before making another one for it."
            )


def occupy(model: nn.Module, worker: object, worker_id: str) -> None:
    """Note that this model is in a run with this worker; raises UsageError as `check_free` does."""
    check_free(model)
    for part in parts_of(unwrapped(model)):
        _occupants[part] = (id(worker), worker_id, os.getpid())


def vacate(model: nn.Module, worker: object) -> None:
    """Note that this worker left."""
    for part in parts_of(unwrapped(model)):
        number, *_ = _occupants.get(part, (0,))
        if number == id(worker):
            del _occupants[part]
