"""Which optimizer steps are counted, and how fast they are.

With several optimizers a step is a round of all of them: a step of the last one in the list, once all
the others have stepped since the one before. It is always the same optimizer that ends a round, so a
step that an AMP scaler skips for one of them delays the count to the end of the next round.

Steps of another optimizer with this model's parameters are not counted, so nothing would ever be pushed
after a script has replaced its optimizer. That is warned about.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

logger = logging.getLogger("diloco.worker")

# Weight of the newest step in the moving average of the pace: about the last twenty steps.
PACE_WEIGHT = 0.05
# Steps of the model's optimizers without a counted one, for each optimizer, before a warning. Optimizers
# may take turns, as in meta-learning, so it is not small.
MOST_UNCOUNTED = 100
CAPTURED = (
    "optimizer.step() was captured in a CUDA graph: its replays call no hook, so their steps are not "
    "counted and this worker pushes nothing. Capture forward and backward alone, and call "
    "optimizer.step() behind each replay."
)


class Pace:
    """Optimizer steps per second of training time, as a moving average."""

    def __init__(self) -> None:
        self.steps_per_s: float | None = None
        self._seconds: float | None = None
        self._resumed_at: float | None = None

    def step(self, now: float) -> None:
        """A step ended; the time since `resume` was training."""
        if self._resumed_at is not None:
            took, average = now - self._resumed_at, self._seconds
            self._seconds = took if average is None else average + PACE_WEIGHT * (took - average)
            self.steps_per_s = 1 / self._seconds if self._seconds else None

    def resume(self, now: float) -> None:
        """Training goes on; the time before was not training."""
        self._resumed_at = now

    def leave_out(self, seconds: float) -> None:
        """Exclude time between two steps that was not training."""
        if self._resumed_at is not None:
            self._resumed_at += seconds


@dataclass(eq=False, repr=False)
class CountedSteps:
    """Counts the steps from `start` to `stop`. Belongs to the training thread."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]  # whose steps are counted
    stepped: Callable[[], None]  # called after each counted step
    tell: Callable[[str], None]  # takes the warning about uncounted steps
    problem: str | None = None  # why steps are not counted, a sentence
    clock: Callable[[], float] = time.monotonic
    pace: Pace = field(default_factory=Pace)
    _uncounted: int = 0  # steps of the model's optimizers since the last counted one
    _has_warned: bool = False
    _stepped: set[int] = field(default_factory=set)  # positions in `optimizers`, in this round
    _hooks: list[Any] = field(default_factory=list)

    def start(self) -> None:
        self._hooks = [each.register_step_post_hook(self._after_step) for each in self.optimizers]
        _set_active(self, True)
        self.pace.resume(self.clock())

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        _set_active(self, False)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if _is_capturing():
            if self.problem is None:
                self.problem = CAPTURED
                logger.error(CAPTURED)
            return
        # A fused optimizer leaves out an overflowing step by itself; the AMP scaler sets this.
        overflow = getattr(optimizer, "found_inf", None)
        if _is_inside_another(optimizer) or (overflow is not None and float(overflow)):
            return
        position = next(n for n, each in enumerate(self.optimizers) if each is optimizer)
        self._stepped.add(position)
        if position == len(self.optimizers) - 1 and len(self._stepped) == len(self.optimizers):
            self._stepped.clear()
            self._uncounted = 0
            if self.problem != CAPTURED:
                self.problem = None
            self.pace.step(self.clock())
            self.stepped()
            self.pace.resume(self.clock())

    def after_any_step(self, optimizer: Optimizer) -> None:
        """Count the step of any optimizer of this process, until a round ends."""
        if any(each is optimizer for each in self.optimizers):
            self._uncounted += len(self.optimizers) > 1
        elif not parameters_of(optimizer).keys().isdisjoint(map(id, self.model.parameters())):
            self._uncounted += 1
        if self._uncounted < MOST_UNCOUNTED * len(self.optimizers) or self.problem is not None:
            return
        ours = ", ".join(type(each).__name__ for each in self.optimizers)
        idle = [str(n) for n in range(len(self.optimizers)) if n not in self._stepped]
        self.problem = (
            f"{self._uncounted} optimizer steps ({type(optimizer).__name__}) changed this model, and "
            f"none was counted or pushed: the worker was made with {ours}, of which optimizer "
            f"{' and '.join(idle) or len(self.optimizers) - 1} made no step. Close this worker and make "
            "a new one with the optimizers in use."
        )
        if not self._has_warned:
            self._has_warned = True
            self.tell(self.problem)


def _is_capturing() -> bool:
    """Whether kernels are being recorded for a CUDA graph instead of run."""
    # The second call is an error before a device is in use.
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return in_use and torch.cuda.is_current_stream_capturing()


def parameters_of(*optimizers: Optimizer) -> dict[int, Tensor]:
    """The parameters that they train, by `id`."""
    return {id(p): p for each in optimizers for group in each.param_groups for p in group["params"]}


def _is_inside_another(optimizer: Optimizer) -> bool:
    """Whether the step whose hook is asking is inside another step of the same optimizer.

    torch calls hooks from a wrapper around `step`, which each class gets when its first optimizer is
    made. Where a user's class calls `super().step()`, and its parent has been used as well, both
    wrappers call the hooks. A counter in a pre-hook would be off for good after an exception in a step,
    so this reads the stack.
    """
    wrapper = sys._getframe(2)  # of the step whose hook is asking
    caller = wrapper.f_back
    while caller is not None:
        if caller.f_code is wrapper.f_code and caller.f_locals.get("self") is optimizer:
            return True
        caller = caller.f_back
    return False


_active: tuple[CountedSteps, ...] = ()
_changing_active = threading.Lock()


def _set_active(counted: CountedSteps, is_active: bool) -> None:
    """Have it called after the steps of all optimizers. Another thread may be in such a step."""
    global _active  # noqa: PLW0603  replaced as a whole: no thread iterates over what changes
    with _changing_active:
        others = tuple(each for each in _active if each is not counted)
        _active = (*others, counted) if is_active else others


def _after_any_step(optimizer: Optimizer, *_: object) -> None:
    for each in _active:
        each.after_any_step(optimizer)


# Registered once: torch iterates over these hooks without a lock, so registering one while another
# thread makes a step breaks that step.
register_optimizer_step_post_hook(_after_any_step)
