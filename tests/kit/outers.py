"""Outer optimizers as the product has them, and beside each the same in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from diloco_broker.tensors.outer.chunked import Buffered, DelayedNesterov, Nesterov, Sgd
from diloco_broker.tensors.outer.make import Outer
from diloco_broker.tensors.outer.torch_fragment import FragmentParameters, OuterOptimizerFactory
from diloco_broker.tensors.outer.torch_optim import TorchOuter
from kit import reference
from kit.reference import ByTorch, State

ETA, MU, N = 0.7, 0.9, 3
# In `by_group`: the embedding (its fragment's layer in the other one) learns at a rate of its own.
FIRST_ETA, FIRST_MU = 0.1, 0.5


def sgd(parameters: FragmentParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=ETA, momentum=MU, nesterov=True)


def adamw(parameters: FragmentParameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, betas=(0.8, 0.95), weight_decay=0.3)


def by_group(parameters: FragmentParameters, lr: float = FIRST_ETA) -> torch.optim.Optimizer:
    first, *others = parameters
    groups: list[dict[str, Any]] = [
        {"params": others},
        {"params": [first], "lr": lr, "momentum": FIRST_MU},
    ]
    return torch.optim.SGD(groups, lr=ETA, momentum=MU, nesterov=True)


def by_momentum(parameters: FragmentParameters) -> torch.optim.Optimizer:
    """Groups that differ in nothing but their momentum."""
    return by_group(parameters, ETA)


def in_torch(factory: OuterOptimizerFactory) -> ByTorch:
    """What its user's factory makes, on whole tensors."""
    return ByTorch(lambda named: factory(FragmentParameters(0, named)))


class ByName:
    """An outer optimizer for each tensor. `make` is told whether it is the first of its fragment."""

    def __init__(self, make: Callable[[bool], reference.Outer]) -> None:
        self.make = make
        self.outers: dict[str, reference.Outer] = {}

    def __call__(self, values: State, gradient: State) -> State:
        after: State = {}
        for place, (name, each) in enumerate(gradient.items()):
            outer = self.outers.setdefault(name, self.make(place == 0))
            after |= outer({name: values[name]}, {name: each})
        return after


def delayed_by_group(first_eta: float) -> ByName:
    rates = {True: (first_eta, FIRST_MU), False: (ETA, MU)}
    return ByName(lambda is_first: reference.DelayedNesterov(*rates[is_first], N, 0.2))


@dataclass(frozen=True)
class Case:
    """An outer optimizer of the product, what makes the same in plain torch, and whether bit for bit."""

    outer: Outer
    reference: Callable[[], reference.Outer]
    is_exact: bool = False


def _nesterov() -> reference.Outer:
    return reference.nesterov(ETA, MU)(0)


CASES: dict[str, Case] = {
    "nesterov": Case(Nesterov(ETA, MU), _nesterov, is_exact=True),
    "classical": Case(
        Nesterov(ETA, MU, nesterov=False),
        lambda: in_torch(lambda p: torch.optim.SGD(p, lr=ETA, momentum=MU)),
        is_exact=True,
    ),
    "plain": Case(Nesterov(ETA, 0.0), lambda: reference.nesterov(ETA, 0.0)(0), is_exact=True),
    "sgd": Case(Sgd(ETA, 1 / N), lambda: reference.without_momentum(ETA, N)(0)),
    "dn": Case(DelayedNesterov(ETA, MU, N), lambda: reference.DelayedNesterov(ETA, MU, N)),
    "dn-c": Case(
        DelayedNesterov(ETA, MU, N, 0.2), lambda: reference.DelayedNesterov(ETA, MU, N, 0.2)
    ),
    "direct": Case(
        Buffered(Nesterov(ETA, MU), N, is_direct=True),
        lambda: reference.Buffered(_nesterov(), N, direct=ETA),
    ),
    "fedbuff": Case(Buffered(Nesterov(ETA, MU), N), lambda: reference.Buffered(_nesterov(), N)),
    "torch": Case(TorchOuter(adamw), lambda: in_torch(adamw), is_exact=True),
    "torch-groups": Case(TorchOuter(by_group), lambda: in_torch(by_group), is_exact=True),
    "torch-fedbuff": Case(
        TorchOuter(adamw, "fedbuff", N), lambda: reference.Buffered(in_torch(adamw), N)
    ),
    "torch-direct": Case(
        TorchOuter(adamw, "direct", N), lambda: reference.Buffered(in_torch(adamw), N, direct=0.1)
    ),
    "torch-paper": Case(TorchOuter(by_group, "paper", N, 0.2), lambda: delayed_by_group(FIRST_ETA)),
}
BY_GROUP: dict[str, Case] = {
    "torch-groups-direct": Case(
        TorchOuter(by_group, "direct", N),
        lambda: ByName(
            lambda is_first: reference.Buffered(
                reference.nesterov(*((FIRST_ETA, FIRST_MU) if is_first else (ETA, MU)))(0),
                N,
                direct=FIRST_ETA if is_first else ETA,
            )
        ),
    ),
    "torch-paper-momentum": Case(
        TorchOuter(by_momentum, "paper", N, 0.2), lambda: delayed_by_group(ETA)
    ),
}
EVERY = {name: case.outer for name, case in CASES.items()}
BY_FACTORY = [name for name in EVERY if name.startswith("torch")]
BUFFERED = [name for name, outer in EVERY.items() if outer.size > 1]
