"""Which optimizer steps are counted, and how fast they are: the completed ones of one optimizer.

Of several optimizers these are the steps of the last one in the list, each once all the others have
stepped since the one before: a round of all of them is one step, however often some step in it. It is
always the same one that ends a round, so a step that an AMP scaler skips for one of them delays the
count to the end of the next round, and never moves it into the middle of one.

Three kinds of steps are not counted although the model is trained by them, so that nothing would ever be
pushed. Each gets a warning:

- Steps of another optimizer with this model's parameters, as when a new optimizer is made in mid-run.
  They call no hook of this worker's own, but one that torch has for all optimizers.
- Updates that no `torch.optim.Optimizer` makes. They call no hook at all; the parameters change from one
  report of the script to the next.
- Replays of a CUDA graph that `optimizer.step()` was captured in. They call no Python at all.

Optimizers may take turns with the counted one, as in a GAN or in meta-learning. So the warning waits for
more steps than were ever seen between two counted ones, and is over as soon as a step is counted.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import weakref
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
# With this many steps of others without one of the counted optimizer, the two do not take turns as those
# of a GAN do.
MANY = 100
# The same for steps with the parameters that the counted optimizer has stepped before: it was replaced.
FEW = 10
# Tensors of the parameters that are compared, and elements of each: it takes about 50 microseconds.
SAMPLED_TENSORS = 4
SAMPLED_ELEMENTS = 32
# Least seconds between two comparisons on an accelerator: each waits for its kernels.
COMPARE_S = 5.0
CAPTURED = (
    "optimizer.step() was captured in a CUDA graph: its replays call no hook, so their steps are not "
    "counted and this worker pushes nothing. Capture forward and backward alone, and call "
    "optimizer.step() behind each replay."
)
REMEDY = (
    "these steps are not counted and never pushed. Close this worker and make a new one with the "
    "optimizer that is in use."
)


class Pace:
    """Optimizer steps per second of training time, as a moving average."""

    def __init__(self) -> None:
        self.steps_per_s: float | None = None
        self._seconds: float | None = None
        self._left_at: float | None = None

    def step(self, now: float) -> None:
        """A step has ended; the time since `resume` was training."""
        if self._left_at is not None:
            took, average = now - self._left_at, self._seconds
            self._seconds = took if average is None else average + PACE_WEIGHT * (took - average)
            self.steps_per_s = 1 / self._seconds if self._seconds else None

    def resume(self, now: float) -> None:
        """Training goes on; what came before was not training."""
        self._left_at = now

    def leave_out(self, seconds: float) -> None:
        """Between two steps, so long was no training."""
        if self._left_at is not None:
            self._left_at += seconds


@dataclass(eq=False, repr=False)
class CountedSteps:
    """See the head of this module. Active from `start` to `stop`; belongs to the training thread."""

    model: nn.Module  # that is trained
    optimizers: tuple[Optimizer, ...]  # whose steps are counted
    stepped: Callable[[], None]  # called after each of them
    tell: Callable[[str], None]  # takes the warning about steps that are not counted
    problem: str | None = None  # why steps are not counted, a sentence
    clock: Callable[[], float] = time.monotonic
    pace: Pace = field(default_factory=Pace)
    _others: int = 0  # steps that were not counted, since the last that was
    _replacing: int = 0  # those of them that have changed what the counted optimizers train
    # The most of either that were seen between two counted steps; None before the first.
    _most_others: int = 0
    _most_replacing: int | None = None
    _stepped: set[int] = field(default_factory=set)  # places in `optimizers`, in this round
    # Of other optimizers: whether they train parts of the model, and parameters of the counted ones,
    # beside the numbers of parameters that all of them had then.
    _trains_ours: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], bool, bool]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _sampled: list[Tensor] | None = None  # the parameters that are compared
    _sample: list[str] | None = None  # their values at the last comparison
    _has_stepped: bool = True  # some optimizer has, since the last report
    _compared_at: float = -math.inf
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
        self.changed()

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
            self._most_others = max(self._most_others, self._others)
            self._most_replacing = max(self._most_replacing or 0, self._replacing)
            self._others = self._replacing = 0
            if self.problem != CAPTURED:
                self.problem = None
            self.pace.step(self.clock())
            self.stepped()
            self.pace.resume(self.clock())

    def _is_captured(self) -> bool:
        """Whether this step is recorded for a CUDA graph, which is a problem."""
        is_captured = _is_capturing()
        if is_captured and self.problem is None:
            self.problem = CAPTURED
            logger.error(CAPTURED)
        return is_captured

    def after_any_step(self, optimizer: Optimizer) -> None:
        """Some optimizer of this process has made a step."""
        self._has_stepped = True
        is_ours = any(each is optimizer for each in self.optimizers)
        if is_ours and len(self.optimizers) == 1:
            self._others = 0
            return
        is_replacing = False
        if is_ours:
            self._others += 1
        else:
            trains_model, is_replacing = self._trained_by(optimizer)
            self._others += trains_model
        # Of a list, all steps are counted here until a round ends: of a long one, more than MANY.
        if self._others == max(MANY * len(self.optimizers), 2 * self._most_others):
            self._complain(self._complaint(optimizer))
        elif is_replacing:
            self._replaced(self._by_another(optimizer, self._replacing + 1))

    def _trained_by(self, other: Optimizer) -> tuple[bool, bool]:
        """Whether another optimizer trains parts of the model, and parameters of the counted ones."""
        # A parameter group may be added to any of them later.
        sizes = [_number_of_parameters(each) for each in (other, *self.optimizers)]
        known = self._trains_ours.get(other)
        if known is None or known[0] != sizes:
            theirs = parameters_of(other).keys()
            known = self._trains_ours[other] = (
                sizes,
                not theirs.isdisjoint(id(parameter) for parameter in self.model.parameters()),
                any(not theirs.isdisjoint(parameters_of(each)) for each in self.optimizers),
            )
        return known[1:]

    def reported(self) -> None:
        """The script has reported: did the parameters change since the last time, without any step?"""
        if self._has_stepped or not self._hooks:
            self._has_stepped, self._sample = False, None
            return
        if _is_capturing():
            return
        if self._sampled is None:
            self._sampled = self._choose()
        now, is_near = self.clock(), all(each.device.type == "cpu" for each in self._sampled)
        if (not self._sampled or not is_near) and now - self._compared_at < COMPARE_S:
            return
        self._compared_at = now
        if not self._sampled or not all(_is_readable(each) for each in self._sampled):
            self.changed()
            return
        before, self._sample = self._sample, [_digest(each) for each in self._sampled]
        if before is not None and before != self._sample:
            self._replaced(
                f"The parameters have changed {self._replacing + 1} times without a step of the "
                f"optimizer ({self._names}) that the worker was made with: {REMEDY} It must be a "
                "torch.optim.Optimizer, and its step() must be called."
            )

    def changed(self) -> None:
        """The parameters may have changed for another reason than a step."""
        self._sampled = self._sample = None

    def _choose(self) -> list[Tensor]:
        """A few readable parameters of the counted optimizers, evenly spaced."""
        found = [
            parameter
            for each in self.optimizers
            for parameter in parameters_of(each).values()
            if _is_readable(parameter)
        ]
        return found[:: max(1, len(found) // SAMPLED_TENSORS)][:SAMPLED_TENSORS]

    def _replaced(self, complaint: str) -> None:
        """Something else has changed what the counted optimizers train."""
        self._replacing += 1
        most = self._most_replacing
        if self._replacing == (MANY if most is None else max(FEW, 2 * most)):
            self._complain(complaint)

    def _complain(self, complaint: str) -> None:
        if self.problem is None:
            self.problem = complaint
            self.tell(complaint)

    @property
    def _names(self) -> str:
        return ", ".join(dict.fromkeys(type(each).__name__ for each in self.optimizers))

    def _by_another(self, stepping: Optimizer, steps: int) -> str:
        return (
            f"Another optimizer ({type(stepping).__name__}) has made {steps} steps with this model's "
            f"parameters, and the one that the worker was made with ({self._names}) none: {REMEDY}"
        )

    def _complaint(self, stepping: Optimizer) -> str:
        """Why the steps of this optimizer are not counted."""
        idle = [n for n in range(len(self.optimizers)) if n not in self._stepped]
        if len(self.optimizers) > 1 and len(idle) < len(self.optimizers):
            return (
                f"{self._others} optimizer steps were made, and none of them was counted or pushed: "
                f"optimizer {idle[0] if idle else len(self.optimizers) - 1} of the list that the worker "
                "was made with takes no part. Close this worker and make a new one with those that "
                "are in use."
            )
        return self._by_another(stepping, self._others)


def _is_capturing() -> bool:
    """Whether the kernels of now are recorded for a CUDA graph instead of run."""
    # Without a device in use the second question may not be asked.
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return in_use and torch.cuda.is_current_stream_capturing()


def parameters_of(*optimizers: Optimizer) -> dict[int, Tensor]:
    """The parameters that they train, by `id`."""
    return {id(p): p for each in optimizers for group in each.param_groups for p in group["params"]}


def _number_of_parameters(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _is_readable(parameter: Tensor) -> bool:
    """Whether this process alone can read the values; other processes hold parts of a DTensor."""
    return (
        type(parameter) in (nn.Parameter, Tensor)
        and parameter.is_contiguous()
        and not parameter.is_meta
        and parameter.numel() > 0
        and parameter.untyped_storage().nbytes() > 0
    )


def _digest(parameter: Tensor) -> str:
    """The sum of a few evenly spaced values. On an accelerator this waits for its kernels."""
    stride = max(1, parameter.numel() // SAMPLED_ELEMENTS)
    with torch.no_grad():
        return float(parameter.view(-1)[::stride].sum(dtype=torch.float32)).hex()


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


_active: tuple[CountedSteps, ...] = ()
_changing_active = threading.Lock()


def _set_active(counted: CountedSteps, is_active: bool) -> None:
    """Have it notified of the steps of all optimizers. Another thread may be in such a step."""
    global _active  # noqa: PLW0603  replaced as a whole: no thread iterates over what changes
    with _changing_active:
        others = tuple(each for each in _active if each is not counted)
        _active = (*others, counted) if is_active else others


def _after_any_step(optimizer: Optimizer, *_: object) -> None:
    for each in _active:
        each.after_any_step(optimizer)


# Once and for all: torch iterates over these hooks without a lock, so to register one while another
# thread makes a step breaks that step.
register_optimizer_step_post_hook(_after_any_step)
