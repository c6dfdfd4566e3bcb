"""Finds the model that an optimizer trains, without the script's help."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from diloco_protocol import UsageError
from diloco_worker.attachment import living_modules, owner_of


class Wrapper(nn.Module):
    """A module around a model, such as its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class DistributedDataParallel(Wrapper):
    """A wrapper with the name of torch's."""


def a_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def test_model_is_found_among_living_modules() -> None:
    model, others = a_model(), [a_model(), copy.deepcopy(a_model())]
    averaged = copy.deepcopy(model)
    assert owner_of(sgd(model), living_modules()) is model
    assert owner_of(sgd(averaged), living_modules()) is averaged
    assert len(others) == 2


def test_optimizer_of_the_head_alone_has_the_whole_model() -> None:
    model = a_model()
    assert owner_of(sgd(model[2]), living_modules()) is model


def test_model_in_two_wrappers_is_their_common_part() -> None:
    model = a_model()
    wrappers = [Wrapper(model), Wrapper(model)]
    assert owner_of(sgd(model), [model, *model, *wrappers]) is model
    assert owner_of(sgd(model), [model, wrappers[0]]) is wrappers[0]


def test_modules_that_share_only_parameters_are_ambiguous() -> None:
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight, other.bias = one.weight, one.bias
    with pytest.raises(UsageError, match="2 models"):
        owner_of(sgd(one), [one, other])


def test_optimizer_of_two_models_or_of_plain_tensors_has_no_owner() -> None:
    one, other = a_model(), a_model()
    with pytest.raises(UsageError, match="all 12 parameters"):
        owner_of(sgd(one, other), living_modules())
    with pytest.raises(UsageError, match="No module holds"):
        owner_of(torch.optim.SGD([nn.Parameter(torch.ones(3))]), living_modules())


def test_model_of_several_processes_is_refused() -> None:
    model = a_model()
    wrapped = DistributedDataParallel(model)
    with pytest.raises(UsageError, match="wrapped in DistributedDataParallel"):
        owner_of(sgd(model), [model, wrapped])


def test_unfinished_module_is_not_an_owner() -> None:
    model = a_model()
    half = Wrapper.__new__(Wrapper)
    assert owner_of(sgd(model), [half, model]) is model
