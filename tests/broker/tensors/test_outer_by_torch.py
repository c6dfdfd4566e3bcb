"""Any optimizer of torch as the outer one, by factory; and which one the options choose."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from diloco_broker.config import BrokerConfig
from diloco_broker.tensors.outer.chunked import Adam, Buffered, DelayedNesterov, Nesterov
from diloco_broker.tensors.outer.make import Outer, make_outer
from diloco_broker.tensors.outer.torch_fragment import FragmentParameters
from diloco_broker.tensors.outer.torch_optim import TorchOuter
from diloco_protocol.errors import UsageError
from diloco_protocol.feed import OuterGroup
from diloco_protocol.tensors.codecs import as_bytes
from kit.chunked_model import MANIFEST, ChunkedModel, fold, same
from kit.outers import EVERY, N, adamw, in_torch


def test_factory_is_called_once_for_each_fragment_with_its_parameters_in_order() -> None:
    calls: list[FragmentParameters] = []
    values: list[list[Tensor]] = []

    def factory(parameters: FragmentParameters) -> torch.optim.Optimizer:
        calls.append(parameters)
        values.append([parameter.detach().clone() for parameter in parameters])
        return torch.optim.SGD(parameters, lr=1.0 + parameters.fragment)

    model = ChunkedModel(TorchOuter(factory), fragments=2)
    assert [parameters.fragment for parameters in calls] == [0, 1]
    for fragment, parameters in enumerate(calls):
        wanted = model.named(fragment, model.start[fragment])
        assert list(parameters.named) == [e.name for e in MANIFEST.entries if e.name in wanted]
        assert list(map(id, parameters)) == list(map(id, parameters.named.values()))
        assert all(p.dtype is torch.float32 for p in parameters)
        assert same(values[fragment], list(wanted.values()))
    model.place(0, torch.randn_like(model.start[0]))  # another worker provides the first version
    starts = [model.theta(fragment) for fragment in range(2)]
    for _ in range(2):
        gradients = [torch.randn_like(start) for start in starts]
        for fragment, gradient in enumerate(gradients):
            model.merges(gradient, fragment=fragment)
            starts[fragment] -= (1.0 + fragment) * gradient
            torch.testing.assert_close(model.theta(fragment), starts[fragment])
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["torch", "torch-fedbuff"])
def test_torch_step_waits_for_the_last_chunk_in_any_order(name: str) -> None:
    model, twin = ChunkedModel(EVERY[name]), ChunkedModel(EVERY[name])
    twin.place(0, model.start[0])
    spans = model.layout.fragments[0].spans
    for count in range(N):
        gradient = torch.randn_like(model.start[0])
        twin.merges(gradient)
        order = torch.randperm(len(spans)).tolist()
        last = max(order, key=lambda i: order.index(i) if spans[i].segment == "parameters" else -1)
        answered: list[int] = []
        for index in order:
            span = spans[index]
            if span.segment == "parameters":
                payload = bytearray(as_bytes(gradient[span.start : span.stop].clone()))
            else:
                payload = bytearray(span.elements * (8 if span.segment == "integers" else 4))
            fold(model.tensors, 0, index, payload, 1.0)
            done = [one.index for one in model.tensors.step(0, index, 1.0, count)()]
            if span.segment != "parameters":
                assert done == [index], "buffers do not wait"
            else:
                assert bool(done) == (index == last)
            answered += done
        assert sorted(answered) == list(range(len(spans)))
        assert torch.equal(model.theta(), twin.theta())


def test_optimizer_gets_no_gradient_for_chunks_that_are_missing() -> None:
    model, whole = ChunkedModel(TorchOuter(adamw)), in_torch(adamw)
    for lacks in ([], [1, 3], [0], []):
        before, gradient = model.theta(), torch.randn_like(model.start[0])
        model.merges(gradient, lacks=lacks)
        is_lacking = torch.zeros_like(before, dtype=torch.bool)
        for index in lacks:
            is_lacking[4 * index : 4 * index + 4] = True
        seen = model.named(0, gradient.masked_fill(is_lacking, 0.0))
        stepped = whole(model.named(0, before), seen)
        flat = torch.cat([each.reshape(-1) for each in stepped.values()])
        assert torch.equal(model.theta(), torch.where(is_lacking, before, flat))


def test_gradients_that_wait_for_other_chunks_are_not_folded_over() -> None:
    model, twin = ChunkedModel(TorchOuter(adamw)), ChunkedModel(TorchOuter(adamw))
    twin.place(0, model.start[0])
    gradient = torch.randn_like(model.start[0])
    for span in model.spans(0):
        payload = as_bytes(gradient[span.start : span.stop].clone())
        fold(model.tensors, 0, span.index, payload, 1.0)
        model.tensors.step(0, span.index, 1.0, 0)()
        fold(model.tensors, 0, span.index, bytearray(payload.nbytes), 1.0)  # of the next round
    twin.merges(gradient)
    assert torch.equal(model.theta(), twin.theta())


class Signs(torch.optim.Optimizer):
    """Steps by the sign of the gradient, which is finite where the gradient is not."""

    def __init__(self, parameters: FragmentParameters) -> None:
        super().__init__(parameters, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.5 * parameter.grad.sign())


def test_gradient_that_is_not_finite_never_reaches_the_optimizer() -> None:
    model = ChunkedModel(TorchOuter(Signs))
    poison = torch.full_like(model.start[0], float("inf"))
    assert all(done.overflow for done in model.merges(poison, count=0))
    assert torch.equal(model.theta(), model.start[0])
    model.merges(torch.ones_like(poison))
    torch.testing.assert_close(model.theta(), model.start[0] - 0.5)


class Stubborn(torch.optim.SGD):
    """Cannot step."""

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("closure is None")


def test_optimizer_that_cannot_step_is_named() -> None:
    model = ChunkedModel(TorchOuter(lambda parameters: Stubborn(parameters, lr=0.1)))
    with pytest.raises(UsageError, match=r"Stubborn.*closure is None"):
        model.merges(torch.randn_like(model.start[0]))


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        (list, "list"),
        (lambda p: torch.optim.SGD([p.named["layer"]], lr=0.1), "4 of 5.*embedding"),
        (lambda p: torch.optim.SGD([Parameter(x.detach().clone()) for x in p], lr=0.1), "5 of 5"),
        (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)), "lr"),
        (lambda p: torch.optim.SGD([p.named["nothing"]], lr=0.1), "nothing"),
    ],
    ids=["no optimizer", "not all parameters", "copies", "a rate that is a tensor", "raises"],
)
def test_factory_that_cannot_be_used_is_refused_with_a_sentence(
    factory: Callable[[FragmentParameters], Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        ChunkedModel(TorchOuter(factory))


@pytest.mark.parametrize(
    ("make", "groups"),
    [
        (lambda p: torch.optim.Adam(p, lr=0.1), OuterGroup(0.5, 0.25)),
        (lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.2), OuterGroup(0.5, 0.25)),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), OuterGroup(0.5, None)),
    ],
    ids=["Adam", "RMSprop", "Adagrad"],
)
def test_groups_have_what_is_set_and_say_what_they_have(make: Any, groups: OuterGroup) -> None:
    model = ChunkedModel(TorchOuter(make))
    own = {"lr": 0.5} if groups.momentum is None else {"lr": 0.5, "momentum": 0.25}
    model.tensors.tune(TorchOuter(make), 1.0, own)
    assert model.tensors.outer_groups() == (groups,)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, Nesterov(0.7, 0.9)),
        ({"nesterov": False, "outer_lr": 0.5}, Nesterov(0.5, 0.9, nesterov=False)),
        ({"outer": "sgd", "workers": 4}, Nesterov(0.7, 0.0)),
        ({"outer": "sgd", "workers": 4, "mode": "async"}, Nesterov(0.7 * 0.25, 0.0)),
        ({"outer": "nesterov", "workers": 4, "mode": "async"}, Nesterov(0.7, 0.9)),
        ({"workers": 4, "mode": "async"}, DelayedNesterov(0.7, 0.9, 4)),
        (
            {"workers": 4, "mode": "async", "dn_buffer": 2, "dn_c": 0.5},
            DelayedNesterov(0.7, 0.9, 2, 0.5),
        ),
        (
            {"workers": 4, "mode": "async", "dn_variant": "direct"},
            Buffered(Nesterov(0.7, 0.9), 4, is_direct=True),
        ),
        ({"outer": "fedbuff", "dn_buffer": 3}, Buffered(Nesterov(0.7, 0.9), 3)),
        ({"outer": "dn"}, DelayedNesterov(0.7, 0.9, 1)),
        (
            {"outer": "cgad", "workers": 4, "mode": "async", "cgad_epsilon": 0.01},
            Adam(0.7, 0.9, 0.01, share=0.25),
        ),
        ({"factory": adamw}, TorchOuter(adamw)),
        ({"factory": adamw, "mode": "async", "workers": 4}, TorchOuter(adamw)),
        ({"factory": adamw, "outer": "fedbuff", "dn_buffer": 3}, TorchOuter(adamw, 3)),
    ],
)
def test_configuration_chooses_the_optimizer(options: dict[str, Any], wanted: Outer) -> None:
    options = dict(options)
    factory = options.pop("factory", None)
    assert make_outer(BrokerConfig(**options), factory) == wanted


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"outer": "sgd"}, "--outer sgd"),
        ({"outer": "nesterov"}, "--outer nesterov"),
        ({"outer": "dn", "mode": "async"}, "--outer dn"),
        ({"outer_lr": 0.5}, "outer_lr is 0.5"),
        ({"mode": "async", "dn_buffer": 2}, "dn_buffer is 2"),
    ],
)
def test_factory_against_the_options_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make_outer(BrokerConfig(**options), adamw)


def test_delayed_nesterov_has_no_classical_form() -> None:
    with pytest.raises(UsageError, match="--no-nesterov"):
        make_outer(BrokerConfig(mode="async", workers=2, nesterov=False))
