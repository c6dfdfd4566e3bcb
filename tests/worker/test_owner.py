"""Finds the model that an optimizer trains, without the script's help."""

import copy
import gc
import threading

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


def test_model_is_found_among_living_modules_by_any_part() -> None:
    model, others = a_model(), [a_model(), copy.deepcopy(a_model())]
    averaged = copy.deepcopy(model)
    living = living_modules()
    assert owner_of(sgd(model), living) is model
    assert owner_of(sgd(averaged), living) is averaged
    assert len(others) == 2
    assert owner_of(sgd(model[2]), living) is model


@pytest.mark.slow
def test_search_does_not_disturb_a_thread_that_builds_a_tuple() -> None:
    """CPython refuses to resize a tuple that a list of all objects refers to."""
    gc.unfreeze()  # with few objects a search is too short to meet the other thread
    begun, ended = threading.Event(), threading.Event()
    errors: list[SystemError] = []

    def build_tuples() -> None:
        while not ended.is_set():
            try:
                tuple(number for number in range(300))
            except SystemError as error:
                errors.append(error)
            begun.set()

    thread = threading.Thread(target=build_tuples)
    thread.start()
    assert begun.wait(20)
    for _ in range(5):
        living_modules()
    ended.set()
    thread.join()
    gc.freeze()
    assert not errors


def test_model_in_two_wrappers_is_their_common_part() -> None:
    model = a_model()
    wrappers = [Wrapper(model), Wrapper(model)]
    assert owner_of(sgd(model), [model, *model, *wrappers]) is model
    assert owner_of(sgd(model), [model, wrappers[0]]) is wrappers[0]


def test_optimizer_without_a_single_owner_is_refused() -> None:
    one, other, wrapped = a_model(), a_model(), DistributedDataParallel(a_model())
    twin, same = nn.Linear(3, 3), nn.Linear(3, 3)
    same.weight, same.bias = twin.weight, twin.bias
    for optimizer, modules, words in (
        (sgd(twin), [twin, same], "2 models"),
        (sgd(one, other), living_modules(), "all 12 parameters"),
        (torch.optim.SGD([nn.Parameter(torch.ones(3))]), living_modules(), "No module holds"),
        (sgd(wrapped), [wrapped.inner, wrapped], "wrapped in DistributedDataParallel"),
    ):
        with pytest.raises(UsageError, match=words):
            owner_of(optimizer, modules)


def test_unfinished_module_is_not_an_owner() -> None:
    model = a_model()
    half = Wrapper.__new__(Wrapper)
    assert owner_of(sgd(model), [half, model]) is model
