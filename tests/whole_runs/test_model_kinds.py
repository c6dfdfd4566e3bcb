"""Models and training loops of many kinds in whole runs, against the loop that knows only names.

Each goes through one fragment and through three; a reply is merged a step later, a quarter of the local
values stays. With a deterministic broker and an fp32 wire every bit agrees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from diloco_broker import Broker
from diloco_worker import DiLoCoWorker
from kit.reference import Plan, Trainee, state_of, streaming
from kit.whole_run import assert_same, batch, make_config, mlp, run, sgd, strided, trainee

STEPS = 23
MakeTrainee = Callable[[int], Trainee]


def plan_of(fragments: list[list[str]], pieces: int) -> Plan:
    """Fragments as they are, or all in one."""
    if pieces == 1:
        return Plan(4, [[name for names in fragments for name in names]], delay=1, alpha=0.25)
    return Plan(7, fragments, delay=1, alpha=0.25)


def check(plan: Plan, make: MakeTrainee, workers: int = 2) -> list[Trainee]:
    """A run and the loop; returns what was trained in the run."""
    config = make_config(
        workers=workers,
        deterministic=True,
        sync_every=plan.sync_every,
        num_fragments=len(plan.fragments),
        fragment_sync_delay=plan.delay,
        fragment_update_alpha=plan.alpha,
    )
    ours = [make(worker) for worker in range(workers)]
    counted = []

    def note(hook: DiLoCoWorker, worker: int, step: int) -> None:
        counted.append(hook.local_step)

    with Broker(config) as broker:
        got = run(broker, ours, STEPS, done=note)
    wanted = streaming([make(worker) for worker in range(workers)], STEPS, plan)
    assert_same(got, wanted, exact=True)
    assert counted == [STEPS] * workers
    return ours


class Buffers(nn.Module):
    """BatchNorm, a running average, integers of two kinds, and a buffer that is nobody's business."""

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


BUFFERS = [
    ["layers.0.weight", "layers.0.bias"],
    ["layers.1.weight", "layers.1.bias"],
    [
        *("layers.2.weight", "layers.2.bias", "norm.weight", "norm.bias"),
        *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
        *("average", "largest", "batches"),
    ],
]


def with_buffers(worker: int) -> Trainee:
    torch.manual_seed(2)
    model = Buffers()
    return trainee(model, sgd(model), worker)


@pytest.mark.parametrize("pieces", [1, 3])
def test_float_and_integer_buffers_travel_with_the_last_fragment(pieces: int) -> None:
    """Float ones are averaged and merged like parameters; of integers the largest is taken over."""
    check(plan_of(BUFFERS, pieces), with_buffers, workers=3)


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


TIED = [
    ["embedding.weight", "h.0.weight", "h.0.bias"],
    ["h.1.weight", "h.1.bias"],
    ["h.2.weight", "h.2.bias", "norm.weight", "norm.bias"],
]


def tied(worker: int) -> Trainee:
    torch.manual_seed(3)
    model = Tied()
    return trainee(model, AdamW([p for p in model.parameters() if p.requires_grad]), worker)


@pytest.mark.parametrize("pieces", [1, 3])
def test_tied_and_frozen_parameters_take_part(pieces: int) -> None:
    for each in check(plan_of(TIED, pieces), tied):
        state = state_of(each.model)
        assert torch.equal(state["head.weight"], state["embedding.weight"])
        assert torch.equal(state["positions"], state_of(tied(0).model)["positions"])


def accumulating(worker: int) -> Trainee:
    """Weights and biases have a learning rate each; three backward passes make a step."""
    torch.manual_seed(4)
    model = mlp()
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": weights, "lr": 0.02}, {"params": biases, "lr": 0.1}]
    optimizer = AdamW(groups)
    number = 0

    def step() -> None:
        nonlocal number
        optimizer.zero_grad()
        for _ in range(3):
            loss: Any = loss_of(model, worker, number) / 3
            loss.backward()
            number += 1
        optimizer.step()

    return Trainee(model, optimizer, step)


def loss_of(model: nn.Module, worker: int, number: int) -> Tensor:
    x = batch(worker, number)
    loss: Tensor = (model(x) - x.sum(1, keepdim=True).sin()).pow(2).mean()
    return loss


@pytest.mark.parametrize("pieces", [1, 3])
def test_groups_and_gradient_accumulation_count_optimizer_steps(pieces: int) -> None:
    check(plan_of(strided(3), pieces), accumulating)


class Scaled:
    """Mixed precision's scaler, with batches now and then whose gradient overflows."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, worker: int) -> None:
        self.model, self.optimizer, self.worker = model, optimizer, worker
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
        self.number = 0
        self.skipped = 0

    def step(self) -> None:
        """The scaler leaves out the optimizer's step where a gradient is infinite."""
        before = -1
        while before != self.skipped:
            before = self.skipped
            overflows = self.number % 5 == 3 - self.worker
            self.optimizer.zero_grad()
            loss = loss_of(self.model, self.worker, self.number) * (torch.inf if overflows else 1)
            self.number += 1
            scaled: Any = self.scaler.scale(loss)
            scaled.backward()
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.skipped += self.scaler.get_scale() < scale


@pytest.mark.parametrize("pieces", [1, 3])
def test_steps_that_the_gradient_scaler_skips_are_not_counted(pieces: int) -> None:
    """Workers skip at different batches, and still send after the same optimizer steps."""
    loops = []

    def scaled(worker: int) -> Trainee:
        torch.manual_seed(5)
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.5)
        loops.append(Scaled(model, optimizer, worker))
        return Trainee(model, optimizer, loops[-1].step)

    check(plan_of(strided(3), pieces), scaled)
    assert [each.skipped for each in loops] == [5, 6, 5, 6]


def test_parameters_in_bf16_are_merged_in_fp32() -> None:
    def narrow(worker: int) -> Trainee:
        torch.manual_seed(6)
        model = mlp().to(torch.bfloat16)
        optimizer = SGD(model.parameters(), lr=0.05)
        number = 0

        def step() -> None:
            nonlocal number
            optimizer.zero_grad()
            model(batch(worker, number).bfloat16()).pow(2).mean().backward()
            number += 1
            optimizer.step()

        return Trainee(model, optimizer, step)

    check(plan_of(strided(3), 3), narrow)
