"""Takes part in a run for a script that knows nothing of it, from the first optimizer step to its end.

The worker joins before that step, when the script has loaded what it loads. Where the run's parameters
differ from the script's, the gradients of that step were computed at the wrong place: they are set to
zero and the step is made at a learning rate of 0, so that it changes no parameter.

A model with several optimizers (Muon beside AdamW) makes its first round of steps without the worker, in
the same way: only then is it known which of them step, and in which order. The worker joins before the
next round, and counts rounds of all of them.
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
from diloco_worker.model.checksums import checksums, differing
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.pair import HOOKS
from diloco_worker.session.restarts import RUN_IS_OVER, WRONG_USAGE
from diloco_worker.settings import EXIT, WorkerOptions, resolve

T = TypeVar("T")

BY_HAND = "Put a DiLoCoWorker into the script instead; docs/training-script.md says how."
# Wrappers that exchange gradients among the processes of one training, by the names of their classes.
OF_SEVERAL_PROCESSES = ("DistributedDataParallel", "FullyShardedDataParallel")
SEEDS = 1 << 63
# Of a parameter group, what a step changes parameters by besides the gradients.
RATES = ("lr", "weight_decay")
FAILED = 1  # exit code of a script that a broker has refused


def say(sentence: object) -> None:
    print(f"diloco-worker: {sentence}", file=sys.stderr, flush=True)


class Attachment:
    """Looks at each optimizer step of this process from now on; not of a forked child."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Whether the script takes part: by this attachment, or by a worker of its own.
        self.is_settled = False
        self._is_left_alone = False
        self._worker: DiLoCoWorker | None = None
        self._model: nn.Module | None = None
        # Those that train the model, in the order in which they step.
        self._optimizers: list[Optimizer] = []
        self._stale: list[Optimizer] = []  # have gradients of other parameters than the run's
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # Whether the script has made any optimizer, and those made since one of ours has stepped.
        self.has_seen_an_optimizer = False
        self._made_since: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        _call_for_each_new_optimizer(self._note)
        register_optimizer_step_pre_hook(self._before_step)

    def leave(self, error: BaseException | None) -> None:
        """The script has ended, with this error if any."""
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
            say(f"This script cannot take part{' by itself' if is_ours else ''}. {error}")
            raise SystemExit(WRONG_USAGE if is_ours else FAILED) from None

    def _note(self, optimizer: Optimizer) -> None:
        if os.getpid() == self._pid:
            self.has_seen_an_optimizer = True
            self._made_since.add(optimizer)

    def _is_without_a_worker(self) -> bool:
        if any(issubclass(type(found), DiLoCoWorker) for found in gc.get_objects()):
            say("The script has a DiLoCoWorker of its own, so --auto leaves the run to it.")
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
        # The script does not look at `should_stop`.
        is_chosen = resolve({}).handle_signals is not None
        options = None if is_chosen else WorkerOptions(handle_signals=EXIT)
        worker = DiLoCoWorker(model, self._optimizers, options=options)
        tensors = ModelTensors.of_module(model)
        before = checksums(tensors)
        worker.start()
        self._worker, self.is_settled = worker, True
        self._seen.update(self._optimizers)
        self._made_since.clear()
        if worker.config is None:
            return  # there is no server, as the worker has said
        is_other = bool(differing(tensors, before))
        if is_other:
            _drop_step(first)
            self._stale = others
        for each in self._optimizers:
            each.register_step_post_hook(self._after_step)
        begins = (
            " It begins with the run's parameters; its first step was computed without them, and is"
        )
        say(
            f"Attached to {type(model).__name__} with "
            f"{sum(p.numel() for p in model.parameters())} parameters, trained by "
            f"{' and '.join(type(each).__name__ for each in self._optimizers)}, as worker "
            f"{worker.worker_id}.{begins + ' dropped.' if is_other else ''}"
        )

    def _after_step(self, *_: Any) -> None:
        if self._worker is not None and os.getpid() == self._pid and self._worker.run_is_over:
            say(f"The run is over: this script ends with code {RUN_IS_OVER}.")
            raise SystemExit(RUN_IS_OVER)

    def _look_at(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that came too late; say of one of another model what it is."""
        if self._made_since and any(each is optimizer for each in self._optimizers):
            self._made_since.clear()
        if any(each is optimizer for each in self._stale):
            self._stale = [each for each in self._stale if each is not optimizer]
            _drop_step(optimizer)
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        if self._trains(optimizer) and not _is_inside(self._optimizers, optimizer):
            new, model = type(optimizer).__name__, type(self._model).__name__
            known = " and ".join(type(each).__name__ for each in self._optimizers)
            if optimizer in self._made_since:
                raise UsageError(
                    f"A new optimizer ({new}) has replaced {known} for {model}, and --auto counts steps "
                    f"of the optimizers that it has joined with. Make one optimizer for the whole "
                    "training and change its learning rates instead (0 while a part is frozen), or give "
                    "each phase a DiLoCoWorker of its own; docs/training-script.md says how."
                )
            raise UsageError(
                f"{new} trains {model}, too, and made no step in the first round of {known}: rounds "
                f"would be closed between the steps of the two. {BY_HAND}"
            )
        ours = {id(parameter) for parameter in self._model.parameters()} if self._model else set()
        if parameters_of(optimizer).keys() - ours:
            say(
                f"{type(optimizer).__name__} trains parameters outside {type(self._model).__name__}; "
                f"these are not exchanged with other workers. {BY_HAND}"
            )


def _require_one_process() -> None:
    distributed = torch.distributed
    if (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    ):
        raise UsageError(f"Several processes train its model together. {BY_HAND}")


def _call_for_each_new_optimizer(note: Callable[[Optimizer], None]) -> None:
    make = Optimizer.__init__

    @wraps(make)
    def make_and_note(self: Optimizer, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        note(self)

    setattr(Optimizer, "__init__", make_and_note)  # noqa: B010  a method, to mypy


def _drop_step(optimizer: Optimizer) -> None:
    """The step that it is about to make changes no parameter.

    The gradients stay tensors, since optimizers may rely on them (Muon's do). A closure computes them
    anew, so the learning rate is 0 as well. That would be a division by zero in LBFGS, which has its
    gradients from the closure alone, computed at the parameters of now.
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

    # It stays: a hook cannot be removed while torch goes through them. Later it has nothing to restore.
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


# Which model optimizers train, where the script does not say so: found in the memory of the process.


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


def owner_of(optimizer: Optimizer, modules: Iterable[nn.Module], *others: Optimizer) -> nn.Module:
    """The outermost module that holds every parameter of the optimizer, and of the others.

    Where several do that are not parts of each other, such as two wrappers of one model, it is the
    outermost that is a part of all of them.

    Raises:
        UsageError: there is none, there are several, or its processes train it together; a sentence.
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
    """Add this to each seed that `torch.manual_seed` is given from now on, and to that of now.

    A script seeds torch alike wherever it runs, and torch itself begins with the same seed in each
    process, so without it all workers of the script would train on the same batches.
    Generators that the script makes, and those of random and numpy, are left as they are.
    """
    if not offset:
        return
    given = torch.manual_seed

    def manual_seed(seed: int) -> Generator:
        """As torch's, with the offset of this worker."""
        return given((int(seed) + offset) % SEEDS)

    torch.manual_seed = torch.random.manual_seed = manual_seed
    given((torch.initial_seed() + offset) % SEEDS)
