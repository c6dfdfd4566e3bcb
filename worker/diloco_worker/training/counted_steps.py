"""Which optimizer steps are counted: the completed steps of one optimizer, each once.

Of several optimizers these are the steps of the last one in the list, each once all the others have
stepped since the one before: a round of all of them is one step, however often some step in it. It is
always the same one that ends a round, so a step that an AMP scaler skips for one of them delays the
count to the end of the next round, and never moves it into the middle of one.

Two kinds of steps would be lost without a word, so that nothing would ever be pushed; each is said once:

- Steps of another optimizer with this model's parameters, as when layers are unfrozen in mid-run and a
  new optimizer is made for them. They call no hook of this worker's.
- Replays of a CUDA graph that `optimizer.step()` was captured in. They call no Python at all.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

logger = logging.getLogger("diloco.worker")

# With this many steps of others without one of the counted optimizer, the two do not take turns as those
# of a GAN do.
MANY = 100
CAPTURED = (
    "optimizer.step() was captured in a CUDA graph: its replays call no hook, so their steps are not "
    "counted and this worker pushes nothing. Capture forward and backward alone, and call "
    "optimizer.step() behind each replay."
)


@dataclass(eq=False, repr=False)
class CountedSteps:
    """See the head of this module. Looks from `start` to `stop`."""

    model: nn.Module  # that is trained
    optimizers: tuple[Optimizer, ...]  # whose steps are counted
    stepped: Callable[[], None]  # called after each of them
    tell: Callable[[str], None]  # takes the sentence about another optimizer's steps
    problem: str | None = None  # why steps are not seen, a sentence
    _others: int = 0  # steps that were not counted, since the last that was
    _stepped: set[int] = field(default_factory=set)  # places in `optimizers`, in this round
    _trains_ours: weakref.WeakKeyDictionary[Optimizer, bool] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _hooks: list[Any] = field(default_factory=list)
    _others_hook: Any = None

    def start(self) -> None:
        self._hooks = [each.register_step_post_hook(self._after_step) for each in self.optimizers]
        self._others_hook = register_optimizer_step_post_hook(self._after_any_step)

    def stop(self) -> None:
        for hook in (*self._hooks, self._others_hook):
            if hook is not None:
                hook.remove()
        self._hooks, self._others_hook = [], None

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._is_captured():
            return
        # A fused optimizer leaves out an overflowing step by itself; the AMP scaler tells it so here.
        overflow = getattr(optimizer, "found_inf", None)
        if _is_inside_another(optimizer) or (overflow is not None and float(overflow)):
            return
        last = len(self.optimizers) - 1
        place = next(n for n, each in enumerate(self.optimizers) if each is optimizer)
        self._stepped.add(place)
        if place == last and len(self._stepped) == len(self.optimizers):
            self._stepped.clear()
            self._others = 0
            self.stepped()

    def _is_captured(self) -> bool:
        """Whether the kernels of now are recorded for a CUDA graph instead of run."""
        # Without a device in use the second question may not be asked.
        in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        is_captured = in_use and torch.cuda.is_current_stream_capturing()
        if is_captured and self.problem is None:
            self.problem = CAPTURED
            logger.error(CAPTURED)
        return is_captured

    def _after_any_step(self, optimizer: Optimizer, *_: object) -> None:
        is_ours = any(each is optimizer for each in self.optimizers)
        if is_ours and len(self.optimizers) == 1:
            self._others = 0
            return
        if optimizer not in self._trains_ours:
            ours = {id(parameter) for parameter in self.model.parameters()}
            trained = (id(p) for group in optimizer.param_groups for p in group["params"])
            self._trains_ours[optimizer] = not ours.isdisjoint(trained)
        self._others += self._trains_ours[optimizer]
        # Of a list, all steps are counted here until a round ends: of a long one, more than MANY.
        if self._others == MANY * len(self.optimizers) and self._others_hook is not None:
            self.tell(self._complaint(optimizer))
            self._others_hook.remove()
            self._others_hook = None

    def _complaint(self, stepping: Optimizer) -> str:
        """Why the steps of this optimizer are of no use."""
        idle = [n for n in range(len(self.optimizers)) if n not in self._stepped]
        if len(self.optimizers) > 1 and len(idle) < len(self.optimizers):
            return (
                f"{self._others} optimizer steps were made, and none of them was counted or pushed: "
                f"optimizer {idle[0] if idle else len(self.optimizers) - 1} of the list that the worker "
                "was made with takes no part. Close this worker and make a new one with those that "
                "are in use."
            )
        return (
            f"Another optimizer ({type(stepping).__name__}) has made {self._others} steps with this "
            "model's parameters, and the one that the worker was made with none: these steps are "
            "not counted and never pushed. Close this worker and make a new one with the "
            "optimizer that is in use."
        )


def _is_inside_another(optimizer: Optimizer) -> bool:
    """Asked by a step hook: was it called for a step inside another one of the same optimizer?

    torch calls hooks from a wrapper around `step`, which each class gets when its first optimizer is
    made. Where a user's class calls `super().step()`, and its parent has been used as well, the hooks
    are called for either. The stack is looked at, since a count that a pre-hook keeps would be off for
    good after an exception in a step.
    """
    wrapper = sys._getframe(2)  # of the step whose hook is asking
    caller = wrapper.f_back
    while caller is not None:
        if caller.f_code is wrapper.f_code and caller.f_locals.get("self") is optimizer:
            return True
        caller = caller.f_back
    return False
