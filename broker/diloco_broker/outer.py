"""Outer optimizers, element by element, so that they can be applied to a chunk at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Nesterov:
    """SGD with momentum, in Nesterov's form or the classical one.

    With g the averaged pseudo-gradient (DiLoCo, Douillard et al. 2023, algorithm 1):

        m <- mu m + g;   theta <- theta - eta (g + mu m)     Nesterov
                         theta <- theta - eta m              classical

    This is `torch.optim.SGD(lr=eta, momentum=mu, nesterov=...)` with `.grad = g`, bit for bit.
    """

    lr: float
    momentum: float
    nesterov: bool = True

    def step(
        self, theta: Tensor, gradient: Tensor, momentum: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """New parameters and new momentum, in new tensors; `gradient` is used as scratch.

        Args:
            theta: parameters, fp32, 1-D; not changed.
            gradient: averaged pseudo-gradient of the same shape.
            momentum: m; None before the first step. Not changed, so that a step whose result
                cannot be used has left no trace.
        """
        if not self.momentum:
            return torch.add(theta, gradient, alpha=-self.lr), None
        if momentum is None:
            moved = gradient.clone()
        else:
            moved = torch.mul(momentum, self.momentum).add_(gradient)
        update = gradient.add_(moved, alpha=self.momentum) if self.nesterov else moved
        return torch.add(theta, update, alpha=-self.lr), moved
