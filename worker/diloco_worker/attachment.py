"""Takes part in a run for a script that knows nothing of it, from the first optimizer step to its end.

The worker joins in front of that step, when the script has loaded what it loads. Where the run's
parameters are others than the script's, the gradients of that step are of the wrong place: they are
dropped, so that the step changes nothing.
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
from diloco_worker.owner import BY_HAND, living_modules, owner_of


def say(sentence: object) -> None:
    print(f"diloco-worker: {sentence}", file=sys.stderr, flush=True)


class Attachment:
    """Looks at each optimizer step of this process from now on; a forked child is no part of it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._is_settled = False  # whether to take part
        self._worker: DiLoCoWorker | None = None
        self._model: nn.Module | None = None
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        register_optimizer_step_pre_hook(self._before_step)

    def leave(self, error: BaseException | None) -> None:
        """The script has ended, with this error if any."""
        if os.getpid() != self._pid:
            return
        if not self._is_settled:
            say("No optimizer of torch has made a step, so there was nothing to take part with.")
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if isinstance(error, SystemExit) and error.code in (None, 0, RUN_IS_OVER):
            error = None  # it has come to its end
        worker.__exit__(type(error) if error else None, error, None)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if os.getpid() != self._pid:
            return
        if self._is_settled:
            self._look_at(optimizer)
            return
        self._is_settled = True
        if any(issubclass(type(found), DiLoCoWorker) for found in gc.get_objects()):
            say("The script has a DiLoCoWorker of its own, so --auto leaves the run to it.")
            return
        try:
            self._attach(optimizer)
        except UsageError as error:
            say(f"This script cannot take part by itself. {error}")
            raise SystemExit(WRONG_USAGE) from None

    def _attach(self, optimizer: Optimizer) -> None:
        distributed = torch.distributed
        if (
            distributed.is_available()
            and distributed.is_initialized()
            and distributed.get_world_size() > 1
        ):
            raise UsageError(f"Several processes train its model together. {BY_HAND}")
        model = owner_of(optimizer, living_modules())
        worker = DiLoCoWorker(model, optimizer)
        tensors = ModelTensors.of_module(model)
        before = checksums(tensors)
        worker.start()
        self._worker, self._model = worker, model
        self._seen.add(optimizer)
        if worker.config is None:
            return  # there is no server, as the worker has said
        is_other = bool(differing(tensors, before))
        if is_other:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        optimizer.register_step_post_hook(self._after_step)
        begins = (
            " It begins with the run's parameters; its first step was computed without them, and is"
        )
        say(
            f"Attached to {type(model).__name__} with "
            f"{sum(p.numel() for p in model.parameters())} parameters, trained by "
            f"{type(optimizer).__name__}, as worker {worker.worker_id}."
            f"{begins + ' dropped.' if is_other else ''}"
        )

    def _after_step(self, *_: Any) -> None:
        if self._worker is not None and os.getpid() == self._pid and self._worker.run_is_over:
            say(f"The run is over: this script ends with code {RUN_IS_OVER}.")
            raise SystemExit(RUN_IS_OVER)

    def _look_at(self, optimizer: Optimizer) -> None:
        """Say of another optimizer, once, that it trains something that is not exchanged."""
        if self._model is None or optimizer in self._seen:
            return
        self._seen.add(optimizer)
        ours = {id(parameter) for parameter in self._model.parameters()}
        if any(id(p) not in ours for group in optimizer.param_groups for p in group["params"]):
            say(
                f"{type(optimizer).__name__} trains parameters outside {type(self._model).__name__}; "
                f"these are not exchanged with other workers. {BY_HAND}"
            )
