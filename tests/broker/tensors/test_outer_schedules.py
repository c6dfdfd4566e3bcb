"""Outer steps under schedules, against plain torch with the rates of each step set by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from diloco_broker.config.schedule import OuterSchedule, Schedule
from diloco_broker.tensors.outer.chunked import Buffered, DelayedNesterov, Nesterov, Sgd
from diloco_broker.tensors.outer.make import Outer
from diloco_broker.tensors.outer.torch_fragment import OuterOptimizerFactory
from diloco_broker.tensors.outer.torch_optim import TorchOuter
from kit import reference
from kit.chunked_model import ChunkedModel
from kit.outers import CASES as PLAIN
from kit.outers import ETA, MU, N, in_torch, sgd
from kit.reference import State

STEPS = 9
# Written down, not asked of the product: within 8 gradients eta falls to a quarter of it, and mu rises.
FALLING = [ETA * (1 - 0.75 * min(count, 8) / 8) for count in range(STEPS)]
FROM_HALF = [0.5 + 0.4 * min(count, 4) / 4 for count in range(STEPS)]
# Without any momentum torch would not begin to collect it.
FROM_ZERO = [max(1e-30, 0.9 * min(count, 4) / 4) for count in range(STEPS)]
SAME = [MU] * STEPS  # a factory's momentum is its own
LR = Schedule.parse("linear:8:0.25")

Rates = dict[str, float]  # lr and momentum of the current gradient


def classical(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=ETA, momentum=MU)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=ETA)


def by_torch(factory: OuterOptimizerFactory, now: Rates) -> reference.Outer:
    def made(parameters: Any) -> torch.optim.Optimizer:
        optimizer = factory(parameters)
        optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0].update(now))
        return optimizer

    return in_torch(made)


def delayed(c: float, now: Rates) -> reference.Outer:
    outer = reference.DelayedNesterov(ETA, MU, N, c)

    def step(values: State, gradient: State) -> State:
        outer.lr, outer.mu = now["lr"], now["momentum"]
        return outer(values, gradient)

    return step


def plain(now: Rates) -> reference.Outer:
    return lambda values, g: {name: values[name] - now["lr"] * g[name] / N for name in g}


def fedbuff(now: Rates) -> reference.Outer:
    return reference.Buffered(by_torch(sgd, now), N)


CASES: dict[str, tuple[Outer, str, list[float], Callable[[Rates], reference.Outer]]] = {
    "nesterov": (Nesterov(ETA, MU), "linear:4:0.5", FROM_HALF, partial(by_torch, sgd)),
    "nesterov-from-0": (Nesterov(ETA, MU), "linear:4", FROM_ZERO, partial(by_torch, sgd)),
    "classical": (
        Nesterov(ETA, MU, nesterov=False),
        "linear:4:0.5",
        FROM_HALF,
        partial(by_torch, classical),
    ),
    "sgd": (Sgd(ETA, 1 / N), "constant", SAME, plain),
    "fedbuff": (Buffered(Nesterov(ETA, MU), N), "linear:4", FROM_ZERO, fedbuff),
    "dn": (DelayedNesterov(ETA, MU, N), "linear:4:0.5", FROM_HALF, partial(delayed, 0.0)),
    "dn-c": (DelayedNesterov(ETA, MU, N, 0.2), "linear:4", FROM_ZERO, partial(delayed, 0.2)),
    "torch": (TorchOuter(sgd), "constant", SAME, partial(by_torch, sgd)),
    "torch-adam": (TorchOuter(adam), "constant", SAME, partial(by_torch, adam)),
}


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_each_step_has_the_rates_that_its_fragment_s_count_says(name: str, fragments: int) -> None:
    outer, warmup, momenta, make = CASES[name]
    schedule = OuterSchedule(LR, Schedule.parse(warmup))
    model = ChunkedModel(outer, fragments=fragments, schedule=schedule)
    now: Rates = {}
    theta, references = list(model.start), [make(now) for _ in range(fragments)]
    # The fragments take turns that are not equal: each counts its own.
    turns = [count % 3 % fragments for count in range(STEPS * fragments)]
    done = [0] * fragments
    for fragment in (turn for turn in turns if done[turn] < STEPS):
        gradient = torch.randn_like(theta[fragment])
        model.merges(gradient, fragment=fragment)
        now |= {"lr": FALLING[done[fragment]], "momentum": momenta[done[fragment]]}
        theta[fragment] = references[fragment]({"": theta[fragment]}, {"": gradient})[""]
        done[fragment] += 1
        torch.testing.assert_close(model.theta(fragment), theta[fragment], rtol=2e-5, atol=2e-5)


RESTARTED = ("nesterov", "classical", "dn", "dn-c", "direct", "fedbuff")


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("name", RESTARTED)
def test_restart_of_the_momentum_equals_a_new_optimizer(name: str, fragments: int) -> None:
    """Also after a resumption from a checkpoint: only the count of the fragment's gradients decides."""
    case, rounds = PLAIN[name], 2
    size = case.outer.size
    schedule = OuterSchedule(size=size, restart=rounds)
    model = ChunkedModel(case.outer, fragments=fragments, schedule=schedule)
    theta, references = list(model.start), [case.reference() for _ in range(fragments)]
    for count in range(3 * rounds * size + 1):
        if count == rounds * size + 1:  # just after the restart
            kept, counts = [model.memory(f) for f in range(fragments)], model.counts
            model = ChunkedModel(case.outer, fragments=fragments, schedule=schedule)
            model.counts = counts
            for fragment, each in enumerate(kept):
                model.tensors.put_back(fragment, each)
        for fragment in range(fragments):
            if count and count % (rounds * size) == 0:
                references[fragment] = case.reference()
            gradient = torch.randn_like(theta[fragment])
            model.merges(gradient, fragment=fragment)
            theta[fragment] = references[fragment]({"": theta[fragment]}, {"": gradient})[""]
            error = 0.0 if case.is_exact else 2e-5
            torch.testing.assert_close(
                model.theta(fragment), theta[fragment], rtol=error, atol=error
            )


def test_momentum_restarts_in_a_round_without_a_usable_gradient() -> None:
    model = ChunkedModel(Nesterov(ETA, MU), schedule=OuterSchedule(restart=2))
    first, second, last = (torch.randn_like(model.start[0]) for _ in range(3))
    model.merges(first, second, None)  # the restart is due in the third
    before = model.theta()
    model.merges(last)
    fresh = PLAIN["nesterov"].reference()({"": before}, {"": last})[""]
    torch.testing.assert_close(model.theta(), fresh, rtol=0.0, atol=0.0)


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
