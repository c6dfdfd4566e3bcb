"""Outer optimizers as the product has them, and beside each the same in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from diloco_broker.tensors.outer.chunked import Adam, Buffered, DelayedNesterov, Nesterov
from diloco_broker.tensors.outer.make import Outer
from diloco_broker.tensors.outer.torch_fragment import FragmentParameters, OuterOptimizerFactory
from diloco_broker.tensors.outer.torch_optim import TorchOuter
from kit import reference
from kit.reference import ByTorch

ETA, MU, N = 0.7, 0.9, 3


def sgd(parameters: FragmentParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=ETA, momentum=MU, nesterov=True)


def adamw(parameters: FragmentParameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, betas=(0.8, 0.95), weight_decay=0.3)


def by_group(parameters: FragmentParameters) -> torch.optim.Optimizer:
    """The embedding (its fragment's layer in the other one) learns at a rate of its own."""
    first, *others = parameters
    groups: list[dict[str, Any]] = [
        {"params": others},
        {"params": [first], "lr": 0.1, "momentum": 0.5},
    ]
    return torch.optim.SGD(groups, lr=ETA, momentum=MU, nesterov=True)


def in_torch(factory: OuterOptimizerFactory) -> ByTorch:
    """What its user's factory makes, on whole tensors."""
    return ByTorch(lambda named: factory(FragmentParameters(0, named)))


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
    "sgd": Case(Nesterov(ETA * (1 / N), 0.0), lambda: reference.without_momentum(ETA, N)(0)),
    "dn": Case(DelayedNesterov(ETA, MU, N), lambda: reference.DelayedNesterov(ETA, MU, N)),
    "dn-c": Case(
        DelayedNesterov(ETA, MU, N, 0.2), lambda: reference.DelayedNesterov(ETA, MU, N, 0.2)
    ),
    "direct": Case(
        Buffered(Nesterov(ETA, MU), N, is_direct=True),
        lambda: reference.Buffered(_nesterov(), N, direct=ETA),
    ),
    "fedbuff": Case(Buffered(Nesterov(ETA, MU), N), lambda: reference.Buffered(_nesterov(), N)),
    "cgad": Case(
        Adam(ETA, MU, 0.01, share=0.25),
        lambda: in_torch(lambda p: torch.optim.Adam(p, lr=ETA / 4, betas=(MU, 0.95), eps=0.01)),
        is_exact=True,
    ),
    "torch": Case(TorchOuter(adamw), lambda: in_torch(adamw), is_exact=True),
    "torch-groups": Case(TorchOuter(by_group), lambda: in_torch(by_group), is_exact=True),
    "torch-fedbuff": Case(TorchOuter(adamw, N), lambda: reference.Buffered(in_torch(adamw), N)),
}
EVERY = {name: case.outer for name, case in CASES.items()}
BUFFERED = [name for name, outer in EVERY.items() if outer.size > 1]
