"""Outer steps under schedules, against loops in plain torch that set the rates of each step by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco_broker.config.schedule import OuterSchedule, Schedule
from diloco_broker.tensors.outer.chunked import Buffered, DelayedNesterov, Nesterov, Sgd
from diloco_broker.tensors.outer.make import Outer
from diloco_broker.tensors.outer.torch_optim import TorchOuter
from kit.chunked_model import ChunkedModel

ETA, MU, N = 0.7, 0.9, 3
STEPS = 9
# Written down, not asked of the product: within 8 gradients eta falls to a quarter of it, and mu rises.
FALLING = [ETA * (1 - 0.75 * min(count, 8) / 8) for count in range(STEPS)]
FROM_HALF = [0.5 + 0.4 * min(count, 4) / 4 for count in range(STEPS)]
FROM_ZERO = [0.9 * min(count, 4) / 4 for count in range(STEPS)]
LR = Schedule.parse("linear:8:0.25")

Stepped = Callable[[Tensor, Tensor, int], Tensor]  # parameters, gradient, gradients before it


def nesterov(mus: list[float], classical: bool = False) -> Stepped:
    """theta <- theta - eta_t (g + mu_t m), with m <- mu_t m + g."""
    m = torch.zeros(())

    def step(theta: Tensor, g: Tensor, count: int) -> Tensor:
        nonlocal m
        m = mus[count] * m + g
        return theta - FALLING[count] * (m if classical else g + mus[count] * m)

    return step


def plain(theta: Tensor, g: Tensor, count: int) -> Tensor:
    return theta - FALLING[count] * g / N


def fedbuff(mus: list[float]) -> Stepped:
    inner, held = nesterov(mus), []

    def step(theta: Tensor, g: Tensor, count: int) -> Tensor:
        held.append(g)
        if (count + 1) % N:
            return theta
        mean = torch.stack(held).mean(0)
        held.clear()
        return inner(theta, mean, count)

    return step


def delayed(mus: list[float], c: float) -> Stepped:
    m, held = torch.zeros(()), []

    def step(theta: Tensor, g: Tensor, count: int) -> Tensor:
        nonlocal m
        held.append(g)
        share = c
        if (count + 1) % N == 0:
            m, share = mus[count] * m + torch.stack(held).mean(0), 1 - c * N + c
            held.clear()
        return theta - FALLING[count] * (share * mus[count] * m + g / N)

    return step


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=ETA, momentum=MU, nesterov=True)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=ETA)


def in_torch(make: Callable[[Any], torch.optim.Optimizer]) -> Stepped:
    """A factory's optimizer, whose groups are given the rate of each step."""
    own: list[tuple[torch.nn.Parameter, torch.optim.Optimizer]] = []

    def step(theta: Tensor, g: Tensor, count: int) -> Tensor:
        if not own:
            parameter = torch.nn.Parameter(theta.clone())
            own.append((parameter, make([parameter])))
        parameter, optimizer = own[0]
        optimizer.param_groups[0]["lr"] = FALLING[count]
        parameter.grad = g.clone()
        optimizer.step()
        return parameter.detach().clone()

    return step


SAME = [MU] * STEPS  # a factory's momentum is its own
CASES: dict[str, tuple[Outer, str, Callable[[], Stepped]]] = {
    "nesterov": (Nesterov(ETA, MU), "linear:4:0.5", lambda: nesterov(FROM_HALF)),
    "nesterov-from-0": (Nesterov(ETA, MU), "linear:4", lambda: nesterov(FROM_ZERO)),
    "classical": (
        Nesterov(ETA, MU, nesterov=False),
        "linear:4:0.5",
        lambda: nesterov(FROM_HALF, classical=True),
    ),
    "sgd": (Sgd(ETA, 1 / N), "constant", lambda: plain),
    "fedbuff": (Buffered(Nesterov(ETA, MU), N), "linear:4", lambda: fedbuff(FROM_ZERO)),
    "dn": (DelayedNesterov(ETA, MU, N), "linear:4:0.5", lambda: delayed(FROM_HALF, 0.0)),
    "dn-c": (DelayedNesterov(ETA, MU, N, 0.2), "linear:4", lambda: delayed(FROM_ZERO, 0.2)),
    "torch": (TorchOuter(sgd), "constant", lambda: in_torch(sgd)),
    "torch-adam": (TorchOuter(adam), "constant", lambda: in_torch(adam)),
    "torch-dn": (TorchOuter(sgd, "paper", N, 0.2), "constant", lambda: delayed(SAME, 0.2)),
}


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_each_step_has_the_rates_that_its_fragment_s_count_says(name: str, fragments: int) -> None:
    outer, warmup, make = CASES[name]
    schedule = OuterSchedule(LR, Schedule.parse(warmup))
    model = ChunkedModel(outer, fragments=fragments, schedule=schedule)
    theta, reference = list(model.start), [make() for _ in range(fragments)]
    # The fragments take turns that are not equal: each counts its own.
    turns = [count % 3 % fragments for count in range(STEPS * fragments)]
    done = [0] * fragments
    for fragment in (turn for turn in turns if done[turn] < STEPS):
        gradient = torch.randn_like(theta[fragment])
        model.merges(gradient, fragment=fragment)
        theta[fragment] = reference[fragment](theta[fragment], gradient, done[fragment])
        done[fragment] += 1
        torch.testing.assert_close(model.theta(fragment), theta[fragment], rtol=2e-5, atol=2e-5)


def test_factory_s_groups_keep_the_rate_that_is_their_own() -> None:
    """`set` changes it and a checkpoint keeps it; a scheduler within the step may change it."""

    class Halving(torch.optim.SGD):
        def step(self, *arguments: Any) -> Any:
            super().step(*arguments)
            self.param_groups[0]["lr"] /= 2

    for make, wanted in ((sgd, ETA), (lambda p: Halving(p, lr=ETA), ETA / 8)):
        model = ChunkedModel(TorchOuter(make), schedule=OuterSchedule(LR))
        for _ in range(3):
            model.merges(torch.randn_like(model.start[0]))
        (group,) = model.tensors.outer_groups()
        assert group.lr == pytest.approx(wanted, rel=1e-12)
