"""What one step of an optimizer is: one call by the training loop, through however many classes."""

from __future__ import annotations

import sys

from torch.optim import Optimizer


def is_inside_another(optimizer: Optimizer) -> bool:
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
