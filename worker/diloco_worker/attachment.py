"""Joins a run for an unmodified script, from its first optimizer step to its end (`--auto`).

The worker joins before that step, once the script has loaded its checkpoint. Where the run's parameters
differ from the script's, the gradients of that step belong to other parameters: they are set to zero
and the step is made at a learning rate of 0, so that it changes no parameter.

With several optimizers (Muon beside AdamW) the first round of steps is dropped in the same way: only
then is it known which of them step, and in which order. The worker joins before the next round, and
counts rounds of all of them.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from diloco_protocol import UsageError
from diloco_protocol.errors import DilocoError
from diloco_worker.counted_steps import parameters_of
from diloco_worker.hook import DiLoCoWorker
from diloco_worker.launching import RUN_IS_OVER, WRONG_USAGE
from diloco_worker.model.checksums import checksums, differing
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.pair import HOOKS
from diloco_worker.settings import EXIT, WorkerOptions, resolve

T = TypeVar("T")

BY_HAND = "Put a DiLoCoWorker into the script instead; docs/training-script.md says how."
# Wrappers that exchange gradients among the processes of one training, by the names of their classes.
OF_SEVERAL_PROCESSES = ("DistributedDataParallel", "FullyShardedDataParallel")
SEEDS = 1 << 63
# Besides the gradients, these let a step change parameters.
RATES = ("lr", "weight_decay")
FAILED = 1  # exit code of a script that the broker refused


def say(sentence: object) -> None:
    print(f"diloco-worker: {sentence}", file=sys.stderr, flush=True)


class Attachment:
    """Watches each optimizer step of this process from now on; not those of a forked child."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Whether the script is in the run: by this attachment, or by its own worker.
        self.is_settled = False
        self._is_left_alone = False
        self._worker: DiLoCoWorker | None = None
        self._model: nn.Module | None = None
        # Those that train the model, in the order of their steps.
        self._optimizers: list[Optimizer] = []
        self._stale: list[Optimizer] = []  # their gradients are not those of the run's parameters
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.has_seen_an_optimizer = False  # the script has made one
        _call_for_each_new_optimizer(self._note)
        register_optimizer_step_pre_hook(self._before_step)

    def leave(self, error: BaseException | None) -> None:
        """The script ended, with this error if any."""
        worker, self._worker = self._worker, None
        if os.getpid() != self._pid or worker is None:
            return
        if isinstance(error, SystemExit) and error.code in (None, 0, RUN_IS_OVER):
            error = None  # a normal end
        worker.__exit__(type(error) if error else None, error, None)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if os.getpid() != self._pid or self._is_left_alone:
            return
        try:
            if self._worker is not None:
                self._look_at(optimizer)
            elif self._is_without_a_worker():
                self._gather(optimizer)
        except DilocoError as error:
            self.is_settled = True
            is_ours = isinstance(error, UsageError)
            say(f"This script cannot join the run. {error}")
            raise SystemExit(WRONG_USAGE if is_ours else FAILED) from None

    def _note(self) -> None:
        self.has_seen_an_optimizer |= os.getpid() == self._pid

    def _is_without_a_worker(self) -> bool:
        if _living(DiLoCoWorker):
            say("The script has its own DiLoCoWorker; --auto does nothing.")
            self.is_settled = self._is_left_alone = True
        return not self._is_left_alone

    def _gather(self, optimizer: Optimizer) -> None:
        """Attach before the first step; with several optimizers before the first one's second step."""
        known = self._optimizers
        if not known:
            _require_one_process()
            self._model = owner_of(optimizer, living_modules())
            known.append(optimizer)
            if not any(
                each is not optimizer and self._trains(each) for each in living_optimizers()
            ):
                self._attach()
                return
        elif optimizer is known[0]:
            self._attach()
            return
        elif not self._trains(optimizer):
            return
        elif all(each is not optimizer for each in known) and not _is_inside(known, optimizer):
            known.append(optimizer)
        _drop_step(optimizer)

    def _trains(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer has any parameter of the model."""
        assert self._model is not None
        ours = {id(parameter) for parameter in self._model.parameters()}
        return not ours.isdisjoint(parameters_of(optimizer))

    def _attach(self) -> None:
        first, *others = self._optimizers
        model = self._model = owner_of(first, living_modules(), *others)
        # The script does not read `should_stop`.
        is_chosen = resolve({}).handle_signals is not None
        options = None if is_chosen else WorkerOptions(handle_signals=EXIT)
        worker = DiLoCoWorker(model, self._optimizers, options=options)
        tensors = ModelTensors.of_module(model)
        before = checksums(tensors)
        worker.start()
        self._worker, self.is_settled = worker, True
        self._seen.update(self._optimizers)
        if worker.config is None:
            return  # without a server, as the worker has warned
        is_other = bool(differing(tensors, before))
        if is_other:
            _drop_step(first)
            self._stale = others
        for each in self._optimizers:
            each.register_step_post_hook(self._after_step)
        dropped = " Its first step was computed without the run's parameters, and is dropped."
        say(
            f"Attached to {type(model).__name__} with "
            f"{sum(p.numel() for p in model.parameters())} parameters, trained by "
            f"{self._names}, as worker {worker.worker_id}.{dropped if is_other else ''}"
        )

    @property
    def _names(self) -> str:
        return " and ".join(type(each).__name__ for each in self._optimizers)

    def _after_step(self, *_: Any) -> None:
        if self._worker is not None and os.getpid() == self._pid and self._worker.run_is_over:
            say(f"The run is over; exiting with code {RUN_IS_OVER}.")
            raise SystemExit(RUN_IS_OVER)

    def _look_at(self, optimizer: Optimizer) -> None:
        """Drop a stale step; refuse an optimizer of the model that did not step at the start."""
        if any(each is optimizer for each in self._stale):
            self._stale = [each for each in self._stale if each is not optimizer]
            _drop_step(optimizer)
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        if self._trains(optimizer) and not _is_inside(self._optimizers, optimizer):
            raise UsageError(
                f"{type(optimizer).__name__} also trains {type(self._model).__name__}, but made no step "
                f"in the first round of {self._names}, so its steps cannot be counted. Make one "
                "optimizer for the whole training and change its learning rates instead (0 while a part "
                f"is frozen). {BY_HAND}"
            )


def _require_one_process() -> None:
    distributed = torch.distributed
    if (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    ):
        raise UsageError(f"Several processes train its model together. {BY_HAND}")


def _call_for_each_new_optimizer(note: Callable[[], None]) -> None:
    make = Optimizer.__init__

    @wraps(make)
    def make_and_note(self: Optimizer, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        note()

    setattr(Optimizer, "__init__", make_and_note)  # noqa: B010  a method, to mypy


def _drop_step(optimizer: Optimizer) -> None:
    """Make the coming step of this optimizer change no parameter.

    The gradients stay tensors, since some optimizers (Muon) rely on them. A closure computes them
    again, so the learning rate is 0 as well; not for LBFGS, which would divide by it and gets its
    gradients from the closure alone, with the current parameters.
    """
    kept = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                with torch.no_grad():
                    parameter.grad.zero_()
        for name in RATES if not isinstance(optimizer, LBFGS) else ():
            rate = group.get(name)
            if isinstance(rate, int | float | Tensor):
                kept.append((group, name, rate))
                group[name] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0

    def restore(*_: Any) -> None:
        while kept:
            group, name, rate = kept.pop()
            group[name] = rate

    # It stays: a hook cannot be removed while torch iterates over them. Later it restores nothing.
    optimizer.register_step_post_hook(restore)


def _is_inside(outer: list[Optimizer], optimizer: Optimizer) -> bool:
    """Whether this optimizer steps within a step of one of these, as SAM's does."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        caller = frame.f_locals.get("self")
        if caller is not optimizer and any(each is caller for each in outer):
            return True
        frame = frame.f_back
    return False


# The model that the optimizers train: found in the memory of the process.


def living_modules() -> list[nn.Module]:
    """All modules that are alive in this process."""
    return _living(nn.Module)


def living_optimizers() -> list[Optimizer]:
    """All optimizers that are alive in this process, without wrappers of others."""
    return [found for found in _living(Optimizer) if HOOKS in vars(found)]


def _living(kind: type[T]) -> list[T]:
    """All objects of this class and of those derived from it.

    An object refers to its class, so the classes lead to it. `gc.get_objects()` would refer to every
    object for a while, and CPython raises a SystemError in another thread that is just building a tuple
    from a generator: it only resizes a tuple that has one reference.
    """
    gc.collect()
    kinds: list[type] = [kind]
    for each in kinds:
        derived: list[type] = type.__subclasses__(each)
        kinds += [other for other in derived if other not in kinds]
    # By type: `isinstance` calls into the object, and lazy ones import their module.
    return [found for found in gc.get_referrers(*kinds) if issubclass(type(found), kind)]


def owner_of(optimizer: Optimizer, modules: Iterable[nn.Module], *others: Optimizer) -> nn.Module:
    """The outermost module that holds every parameter of these optimizers.

    Of several, such as two wrappers of one model, the outermost module that all of them contain.

    Raises:
        UsageError: there is none, there are several, or several processes train it together.
    """
    wanted = parameters_of(optimizer, *others).keys()
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


def shift_seeds(offset: int) -> None:
    """Add this to the current seed of torch and to each later one of `torch.manual_seed`.

    A script seeds torch alike on each machine, so all of its workers would train on the same batches.
    Generators of the script, and those of random and numpy, keep their seeds.
    """
    if not offset:
        return
    given = torch.manual_seed

    def manual_seed(seed: int) -> Generator:
        """As torch's, with the offset of this worker."""
        return given((int(seed) + offset) % SEEDS)

    torch.manual_seed = torch.random.manual_seed = manual_seed
    given((torch.initial_seed() + offset) % SEEDS)
