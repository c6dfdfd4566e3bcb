"""Takes part in a run for a script that knows nothing of it, from the first optimizer step to its end.

The worker joins before that step, when the script has loaded what it loads. Where the run's parameters
differ from the script's, the gradients of that step were computed at the wrong place: they are dropped,
so that the step changes nothing.

A model with several optimizers (Muon beside AdamW) makes its first round of steps without the worker and
without gradients: only then is it known which of them step, and in which order. The worker joins before
the next round, and counts rounds of all of them.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from diloco_protocol import UsageError
from diloco_worker.core.restarts import RUN_IS_OVER, WRONG_USAGE
from diloco_worker.hook import DiLoCoWorker
from diloco_worker.model.checksums import checksums, differing
from diloco_worker.model.model_tensors import ModelTensors
from diloco_worker.owner import (
    BY_HAND,
    living_modules,
    living_optimizers,
    owner_of,
    parameters_of,
)


def say(sentence: object) -> None:
    print(f"diloco-worker: {sentence}", file=sys.stderr, flush=True)


class Attachment:
    """Looks at each optimizer step of this process from now on; a forked child is no part of it."""

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
        register_optimizer_step_pre_hook(self._before_step)

    def leave(self, error: BaseException | None) -> None:
        """The script has ended, with this error if any."""
        worker, self._worker = self._worker, None
        if os.getpid() != self._pid or worker is None:
            return
        if isinstance(error, SystemExit) and error.code in (None, 0, RUN_IS_OVER):
            error = None  # it has come to its end
        worker.__exit__(type(error) if error else None, error, None)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if os.getpid() != self._pid or self._is_left_alone:
            return
        try:
            if self._worker is not None:
                self._look_at(optimizer)
            elif self._is_without_a_worker():
                self._gather(optimizer)
        except UsageError as error:
            say(f"This script cannot take part by itself. {error}")
            raise SystemExit(WRONG_USAGE) from None

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
        elif not self._trains(optimizer) or _is_inside(known, optimizer):
            return
        elif all(each is not optimizer for each in known):
            known.append(optimizer)
        _drop_gradients(optimizer)

    def _trains(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer has any parameter of the model."""
        assert self._model is not None
        ours = {id(parameter) for parameter in self._model.parameters()}
        return not ours.isdisjoint(parameters_of(optimizer))

    def _attach(self) -> None:
        first, *others = self._optimizers
        model = self._model = owner_of(first, living_modules(), *others)
        worker = DiLoCoWorker(model, self._optimizers)
        tensors = ModelTensors.of_module(model)
        before = checksums(tensors)
        worker.start()
        self._worker, self.is_settled = worker, True
        self._seen.update(self._optimizers)
        if worker.config is None:
            return  # there is no server, as the worker has said
        is_other = bool(differing(tensors, before))
        if is_other:
            _drop_gradients(first)
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
        if any(each is optimizer for each in self._stale):
            self._stale = [each for each in self._stale if each is not optimizer]
            _drop_gradients(optimizer)
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        if self._trains(optimizer) and not _is_inside(self._optimizers, optimizer):
            raise UsageError(
                f"{type(optimizer).__name__} trains {type(self._model).__name__}, too, and made no step "
                f"in the first round of {type(self._optimizers[0]).__name__}: rounds would be closed "
                f"between the steps of the two. {BY_HAND}"
            )
        ours = {id(parameter) for parameter in self._model.parameters()} if self._model else set()
        if parameters_of(optimizer) - ours:
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


def _drop_gradients(optimizer: Optimizer) -> None:
    """The step that it is about to make changes nothing."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _is_inside(outer: list[Optimizer], optimizer: Optimizer) -> bool:
    """Whether this optimizer steps within a step of one of these, as SAM's does."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        caller = frame.f_locals.get("self")
        if caller is not optimizer and any(each is caller for each in outer):
            return True
        frame = frame.f_back
    return False
