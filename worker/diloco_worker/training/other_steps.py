"""Notices that a model is trained by another optimizer than the one whose steps are counted.

As when layers are unfrozen in mid-run and a new optimizer is made for them: its steps call no hook of
this worker's, no boundary comes, and nothing would ever be pushed or said.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

# So many steps of others without one of the counted optimizer are no turns of theirs, as the two
# optimizers of a GAN take them.
MANY = 100


class OtherSteps:
    """See the head of this module. Looks from `start` to `stop`, and says it once.

    Args:
        model: that is trained.
        counted: the optimizer whose steps are counted.
        tell: takes the sentence.
    """

    def __init__(self, model: nn.Module, counted: Optimizer, tell: Callable[[str], None]) -> None:
        self._model = model
        self._counted = counted
        self._tell = tell
        self._steps = 0  # of others, since the counted one made its last
        self._trains_ours: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._hook: Any = None

    def start(self) -> None:
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer is self._counted:
            self._steps = 0
            return
        if optimizer not in self._trains_ours:
            ours = {id(parameter) for parameter in self._model.parameters()}
            trained = (id(p) for group in optimizer.param_groups for p in group["params"])
            self._trains_ours[optimizer] = not ours.isdisjoint(trained)
        self._steps += self._trains_ours[optimizer]
        if self._steps == MANY and self._hook is not None:
            self._tell(
                f"Another optimizer ({type(optimizer).__name__}) has made {MANY} steps with this "
                "model's parameters, and the one that the worker was made with none: these steps are "
                "not counted and never pushed. Close this worker and make a new one with the "
                "optimizer that is in use."
            )
            self.stop()
