"""Element-wise outer optimizers, which can step one chunk at a time.

Throughout, g is an averaged pseudo-gradient (the parameters the workers started from minus those they
reached), theta the global parameters, eta the learning rate, mu the momentum, N the size of a buffer
and t = `count` the number of gradients of this fragment before this one. A *boundary* is a step with
(t + 1) mod N = 0. It is taken even if its own gradient is unusable, then with a gradient of 0 (see
`advance`); otherwise the next boundary would divide up to 2N - 1 gradients by N.

    name       between boundaries              at a boundary                        source
    nesterov   -                               Nesterov step on g                   arXiv 2311.08105
    dn paper   theta -= eta (c mu m + g/N)     m <- mu m + mean;                    arXiv 2401.09135
                                               theta -= eta ((1 - cN + c) mu m + g/N)
    dn direct  theta -= eta g                  Nesterov step on the mean            see Buffered
    fedbuff    -                               Nesterov step on the mean            arXiv 2106.06639
    sgd        -                               theta -= eta share g: Nesterov with mu = 0
    cgad       -                               Adam step on g, a push with less   arXiv 2605.09126
                                               weight the staler it is

Tensors are never modified: a step makes new ones, also of the state, because a step with an unusable
result must have no effect, and a state that is being saved must not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from diloco_broker.config.schedule import OuterSchedule
from diloco_broker.tensors.memory import empty, empty_like
from diloco_protocol import kernels

State = Mapping[str, Tensor]
"""The state of one chunk, by name; a name is missing before its first use. Immutable."""

Stepped = tuple[Tensor, State]
"""New parameters and new state."""

MOMENTUM = "momentum"  # m
DELAYED = "delayed"  # D, the sum of the gradients in the buffer
SQUARES = "squares"  # v, Adam's second moment
BETA2 = 0.95  # of Adam


def added(state: State, gradient: Tensor) -> Tensor:
    """The buffer's sum with one more gradient, in a new tensor."""
    total = state.get(DELAYED)
    if total is None:
        return empty_like(gradient).copy_(gradient)
    return torch.add(total, gradient, out=empty_like(gradient))


def without(state: State, name: str) -> State:
    """The state without MOMENTUM, or without the buffered gradients (DELAYED)."""
    return {each: tensor for each, tensor in state.items() if each != name}


class ChunkOuter(Protocol):
    """An outer optimizer that works on one chunk at a time.

    `size` is N, the number of gradients in a buffer; 1 without a buffer.
    """

    @property
    def size(self) -> int: ...

    def at(self, schedule: OuterSchedule, count: int) -> ChunkOuter:
        """The optimizer with the learning rate and momentum of the step after `count` gradients."""
        ...

    def step(self, theta: Tensor, gradient: Tensor, state: State, count: int) -> Stepped:
        """New parameters and new state; `gradient` may be used as scratch.

        Args:
            theta: parameters, fp32, 1-D; not changed.
            gradient: averaged pseudo-gradient of the same shape.
            state: result of the previous step; empty at first. Not changed.
            count: gradients of this fragment before this one.
        """
        ...


@dataclass(frozen=True)
class Nesterov:
    """SGD with momentum, in Nesterov's form or the classical one.

    DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1):

        m <- mu m + g;   theta <- theta - eta (g + mu m)     Nesterov
                         theta <- theta - eta m              classical

    This is `torch.optim.SGD(lr=eta, momentum=mu, nesterov=...)` with `.grad = g`, bit for bit.
    """

    size: ClassVar[int] = 1

    lr: float
    momentum: float
    nesterov: bool = True
    warms_up: bool = False  # keep m although the momentum is 0 now, because it will increase

    def at(self, schedule: OuterSchedule, count: int) -> Nesterov:
        momentum, lr = schedule.momentum(self.momentum, count), self.lr * schedule.factor(count)
        return replace(self, lr=lr, momentum=momentum, warms_up=self.momentum > 0)

    def step(self, theta: Tensor, gradient: Tensor, state: State, count: int = 0) -> Stepped:
        update, after = gradient, {}
        if self.momentum or self.warms_up:
            before, kept = state.get(MOMENTUM), empty_like(theta)
            if before is None:
                kept.copy_(gradient)
            else:
                torch.mul(before, self.momentum, out=kept).add_(gradient)
            update = gradient.add_(kept, alpha=self.momentum) if self.nesterov else kept
            after = {MOMENTUM: kept}
        return torch.add(theta, update, alpha=-self.lr, out=empty_like(theta)), after

    def step_by_kernel(
        self,
        fast: kernels.Kernels,
        theta: Tensor,
        gradient: tuple[kernels.Terms, float],
        state: State,
        *,
        count: int,
        wire: torch.dtype,
    ) -> tuple[Stepped, Tensor | None]:
        """`step` with the mean of terms; sum, step and wire form are computed in one pass.

        Args:
            gradient: the terms and the divisor of their sum.
            wire: a dtype of `kernels.FORMS`.

        Returns:
            The result of `step`, and the parameters in that dtype; None if they are not finite in it.
        """
        moved = empty_like(theta)
        has_momentum = self.momentum or self.warms_up
        after = empty_like(theta) if has_momentum else None
        sent = moved if wire is theta.dtype else empty(theta.numel(), wire)
        settings, before = (self.momentum, self.lr, self.nesterov), state.get(MOMENTUM)
        out = (moved, after, sent)
        is_fine = fast.nesterov(*gradient, theta, before, settings=settings, out=out)
        return (moved, {} if after is None else {MOMENTUM: after}), sent if is_fine else None


@dataclass(frozen=True)
class Adam:
    """`torch.optim.Adam(lr=eta share, betas=(beta1, BETA2), eps=eps)`, bit for bit.

        m <- beta1 m + (1 - beta1) g;   v <- beta2 v + (1 - beta2) g^2
        theta <- theta - eta share m' / (sqrt(v') + eps)      m', v': without the bias to 0 at the start

    As CGAD (arXiv 2605.09126) it takes gradients that the core has scaled by their staleness; `share` is
    1/workers, because each gradient is a single push. No schedule changes beta1, because the correction
    of the bias needs a constant one.
    """

    size: ClassVar[int] = 1

    lr: float
    beta1: float
    eps: float
    share: float = 1.0

    def at(self, schedule: OuterSchedule, count: int) -> Adam:
        return replace(self, lr=self.lr * schedule.factor(count))

    def step(self, theta: Tensor, gradient: Tensor, state: State, count: int) -> Stepped:
        first, second = (
            empty_like(theta).copy_(state[name]) if name in state else empty_like(theta).zero_()
            for name in (MOMENTUM, SQUARES)
        )
        first.lerp_(gradient, 1 - self.beta1)
        second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        rate = self.lr * self.share / (1 - self.beta1 ** (count + 1))
        root = torch.sqrt(second, out=gradient).div_((1 - BETA2 ** (count + 1)) ** 0.5)
        moved = empty_like(theta).copy_(theta)
        moved.addcdiv_(first, root.add_(self.eps), value=-rate)
        return moved, {MOMENTUM: first, SQUARES: second}


@dataclass(frozen=True)
class DelayedNesterov:
    """Delayed Nesterov (Liu et al. 2024, arXiv 2401.09135, algorithm 3); c is in [0, 1/N].

        D <- D + g
        at a boundary:  m <- mu m + D/N;  theta <- theta - eta ((1 - cN + c) mu m + g/N);  D <- 0
        otherwise:                        theta <- theta - eta (c mu m + g/N)

    With c = 0, N gradients from the same parameters result in one Nesterov step on their mean. With
    c > 0 the momentum is spread over the N steps: a share of c in each, the rest at the boundary.
    """

    lr: float
    momentum: float
    size: int
    c: float = 0.0

    def at(self, schedule: OuterSchedule, count: int) -> DelayedNesterov:
        momentum, lr = schedule.momentum(self.momentum, count), self.lr * schedule.factor(count)
        return replace(self, lr=lr, momentum=momentum)

    def step_by_kernel(
        self,
        fast: kernels.Kernels,
        theta: Tensor,
        gradient: tuple[kernels.Terms, float],
        state: State,
        *,
        count: int,
        wire: torch.dtype,
    ) -> tuple[Stepped, Tensor | None]:
        """As `Nesterov.step_by_kernel`."""
        moved, kept = empty_like(theta), empty_like(theta)
        sent = moved if wire is theta.dtype else empty(theta.numel(), wire)
        momentum, is_boundary = state.get(MOMENTUM), (count + 1) % self.size == 0
        portion = 1 - self.c * self.size + self.c if is_boundary else self.c
        rates = self.lr / self.size, self.lr * portion * self.momentum
        has_m = bool(portion * self.momentum)
        is_fine = fast.delayed(
            *gradient,
            theta,
            (state.get(DELAYED), momentum),
            settings=(self.momentum, self.size if is_boundary else 0, *rates, has_m),
            out=(moved, kept, sent),
        )
        after = {MOMENTUM: kept} if is_boundary else {**state, DELAYED: kept}
        return (moved, after), sent if is_fine else None

    def step(self, theta: Tensor, gradient: Tensor, state: State, count: int) -> Stepped:
        total = added(state, gradient)
        momentum = state.get(MOMENTUM)
        if (count + 1) % self.size:
            portion = self.c
            state = {**state, DELAYED: total}
        else:
            portion = 1 - self.c * self.size + self.c
            mean = total.div_(self.size)
            momentum = mean if momentum is None else mean.add_(momentum, alpha=self.momentum)
            state = {MOMENTUM: momentum}
        moved = torch.add(theta, gradient, alpha=-self.lr / self.size, out=empty_like(theta))
        if momentum is not None and portion * self.momentum:
            moved.add_(momentum, alpha=-self.lr * portion * self.momentum)
        return moved, state


@dataclass(frozen=True)
class Buffered:
    """A buffer of N gradients, then one step on their mean (Nguyen et al. 2022, arXiv 2106.06639).

        D <- D + g
        at a boundary:  theta <- inner step on D/N;  D <- 0
        otherwise:      theta <- theta - eta g, if `is_direct`

    With `is_direct` it is a simpler reading of Delayed Nesterov, for comparison (`--dn-variant direct`).
    It counts gradients twice: all but the last of a buffer are applied on arrival, and again, with the
    last, in the mean. From a fresh start with mu = 0, N equal gradients g move theta by eta N g; the
    paper's form moves it by eta g. broker/ALGORITHMS.md has measurements.
    """

    inner: Nesterov
    size: int
    is_direct: bool = False

    def at(self, schedule: OuterSchedule, count: int) -> Buffered:
        return replace(self, inner=self.inner.at(schedule, count))

    def step(self, theta: Tensor, gradient: Tensor, state: State, count: int) -> Stepped:
        total = added(state, gradient)
        if (count + 1) % self.size == 0:
            return self.inner.step(theta, total.div_(self.size), state, count)
        if self.is_direct:
            theta = torch.add(theta, gradient, alpha=-self.inner.lr, out=empty_like(theta))
        return theta, {**state, DELAYED: total}
