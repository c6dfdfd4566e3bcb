"""Models of many kinds in whole runs, against the loop that knows only names, bit for bit.

Each goes through one fragment and through three; a reply is merged a step later, a quarter of the local
values stays.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from diloco_worker import DiLoCoWorker
from kit.reference import Plan, Trainee, state_of
from kit.whole_run import batch, check, mlp, sgd, strided, trainee


class Buffers(nn.Module):
    """BatchNorm, a running average, integers of two kinds, and a buffer that is not persistent."""

    average: Tensor
    largest: Tensor
    batches: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)])
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("largest", torch.full((4,), -5, dtype=torch.int32))
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.largest.copy_(torch.maximum(self.largest, (10 * x.detach().max(0).values).int()))
        self.batches += 1
        self.scratch.copy_(x.detach()[0, :2])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        normed: Tensor = self.norm(x)
        return normed


class Tied(nn.Module):
    """A small language model: the head is the embedding, and a table of positions is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.positions = nn.Parameter(torch.randn(6, 6), requires_grad=False)
        self.h = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs().sum(1) * 100).long() % 11
        hidden = self.embedding(tokens) + self.positions
        for layer in self.h:
            hidden = hidden + torch.tanh(layer(hidden))
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def with_buffers(worker: int) -> Trainee:
    torch.manual_seed(2)
    model = Buffers()
    return trainee(model, sgd(model), worker)


def tied(worker: int) -> Trainee:
    torch.manual_seed(3)
    model = Tied()
    return trainee(model, AdamW([p for p in model.parameters() if p.requires_grad]), worker)


def of_dtype(dtype: torch.dtype, worker: int) -> Trainee:
    torch.manual_seed(6)
    model = mlp().to(dtype)
    optimizer = sgd(model)
    number = 0

    def step() -> None:
        nonlocal number
        optimizer.zero_grad()
        model(batch(worker, number).to(dtype)).pow(2).mean().backward()
        number += 1
        optimizer.step()

    return Trainee(model, optimizer, step)


KINDS: dict[str, tuple[Callable[[int], Trainee], int, list[list[str]]]] = {
    # Float buffers are averaged and merged like parameters; of integers the largest is taken over.
    "buffers": (
        with_buffers,
        3,
        [
            ["layers.0.weight", "layers.0.bias"],
            ["layers.1.weight", "layers.1.bias"],
            [
                *("layers.2.weight", "layers.2.bias", "norm.weight", "norm.bias"),
                *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
                *("average", "largest", "batches"),
            ],
        ],
    ),
    "tied and frozen": (
        tied,
        2,
        [
            ["embedding.weight", "h.0.weight", "h.0.bias"],
            ["h.1.weight", "h.1.bias"],
            ["h.2.weight", "h.2.bias", "norm.weight", "norm.bias"],
        ],
    ),
    "bf16": (partial(of_dtype, torch.bfloat16), 2, strided(3)),
    "fp16": (partial(of_dtype, torch.float16), 2, strided(3)),
    "fp64, exchanged in fp32": (partial(of_dtype, torch.float64), 2, strided(3)),
}


@pytest.mark.parametrize(("kind", "pieces"), [*((kind, 3) for kind in KINDS), ("buffers", 1)])
def test_buffers_tied_frozen_and_narrow_tensors_take_part(kind: str, pieces: int) -> None:
    make, workers, fragments = KINDS[kind]
    if pieces == 1:
        fragments = [[name for names in fragments for name in names]]
    counted = []

    def note(hook: DiLoCoWorker, worker: int, step: int) -> None:
        counted.append(hook.local_step)

    plan = Plan(7 if pieces > 1 else 4, fragments, delay=1, alpha=0.25)
    before = make(0)
    is_exact = not kind.startswith("fp64")
    for each in check(plan, make, workers=workers, steps=23, exact=is_exact, done=note):
        assert [t.dtype for t in each.model.parameters()] == [
            t.dtype for t in before.model.parameters()
        ]
        if kind == "tied and frozen":
            state = state_of(each.model)
            assert torch.equal(state["head.weight"], state["embedding.weight"])
            assert torch.equal(state["positions"], state_of(before.model)["positions"])
    assert counted == [23] * workers
