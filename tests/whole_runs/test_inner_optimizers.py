"""Optimizers of all kinds, mixed precision, accumulation, schedules: the loop, bit for bit.

A step that the AMP scaler skips does not count, a closure that is called ten times belongs to one step,
and gradients of several batches make one step. The loop in `reference` knows nothing of the product, so
a step counted wrongly moves a boundary and shows in every later value.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer, lr_scheduler

from kit.reference import Plan, Trainee
from kit.whole_run import an_mlp, batch, check, strided

ROUNDS = 10
# An AMP scaler halves its scale until nothing overflows, from 2**24 in fp16.
ATTEMPTS = 40

PLAN = Plan(4, strided(2), delay=1, alpha=0.5)


MakeOptimizer = Callable[[nn.Module], Optimizer]


def of(kind: Callable[..., Optimizer], **options: Any) -> MakeOptimizer:
    return lambda model: kind(model.parameters(), **options)


def in_groups(model: nn.Module) -> Optimizer:
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.03}]
    return optim.AdamW(groups, lr=0.01)


@dataclass(frozen=True)
class Recipe:
    optimizer: MakeOptimizer
    precision: str
    accumulation: int
    one_cycle: bool = False  # of the learning rate and the momentum


# Each kind of optimizer once, and each of the other settings with each value twice at least.
RECIPES = {
    "SGD, Nesterov": Recipe(of(optim.SGD, lr=0.05, momentum=0.9, nesterov=True), "fp16", 1),
    "Adam, AMSGrad": Recipe(of(optim.Adam, lr=0.01, amsgrad=True), "fp16", 3, one_cycle=True),
    # Without momentum: torch begins with uninitialised memory if the first fused step overflows.
    "SGD, fused": Recipe(of(optim.SGD, lr=0.05, fused=True), "fp16", 1),
    "AdamW in groups": Recipe(in_groups, "bf16", 3),
    "AdamW, fused": Recipe(of(optim.AdamW, lr=0.01, fused=True), "bf16", 1, one_cycle=True),
    "SGD, maximize": Recipe(of(optim.SGD, lr=0.05, momentum=0.5, maximize=True), "fp32", 3),
    "Adagrad": Recipe(of(optim.Adagrad, lr=0.05, lr_decay=0.01), "fp32", 1),
}


class Training:
    """A user's training loop; `step` goes on until the optimizer has made one."""

    def __init__(self, recipe: Recipe, worker: int) -> None:
        self.model = an_mlp(worker).model
        self.optimizer = recipe.optimizer(self.model)
        self.schedule = (
            lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.02, total_steps=2 * ROUNDS + 1)
            if recipe.one_cycle
            else None
        )
        self.scaler = (
            GradScaler("cpu", init_scale=2.0 ** (24 + 2 * worker), growth_interval=4)
            if recipe.precision == "fp16"
            else None
        )
        self.recipe, self.worker = recipe, worker
        self.batches = itertools.count()
        self.skipped = 0

    def trainee(self) -> Trainee:
        return Trainee(self.model, self.optimizer, self.step)

    def loss(self) -> Tensor:
        x = batch(self.worker, next(self.batches))
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.recipe.precision)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            y = self.model(x)
        loss: Tensor = (y.float() - x.sum(1, keepdim=True).sin()).pow(2).mean()
        return -loss if self.optimizer.defaults.get("maximize") else loss

    def step(self) -> None:
        for _ in range(ATTEMPTS):
            self.optimizer.zero_grad()
            for _ in range(self.recipe.accumulation):
                loss = self.loss() / self.recipe.accumulation
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
            if self.stepped():
                break
            self.skipped += 1
        else:
            raise AssertionError("the scaler did not find a scale")
        if self.schedule is not None:
            self.schedule.step()

    def stepped(self) -> bool:
        """Make the optimizer's step; whether it was made, as users of a scaler find out."""
        if self.scaler is None:
            self.optimizer.step()
            return True
        scale = self.scaler.get_scale()
        if self.recipe.accumulation > 1:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= scale


def equals_the_loop(make: Callable[[int], Trainee]) -> None:
    check(PLAN, make, steps=ROUNDS * PLAN.sync_every // len(PLAN.fragments) + 1)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_run_with_any_optimizer_and_recipe_is_the_loop_bit_for_bit(recipe: Recipe) -> None:
    made: list[Training] = []

    def make(worker: int) -> Trainee:
        made.append(Training(recipe, worker))
        return made[-1].trainee()

    equals_the_loop(make)
    if recipe.precision == "fp16":
        ours = [each.skipped for each in made[:2]]
        assert min(ours) > 2 and ours[0] != ours[1], "workers skip different batches"


def looped(model: nn.Module, optimizer: Optimizer, step: Callable[[int], None]) -> Trainee:
    """What makes steps 0, 1, ..."""
    numbers = itertools.count()
    return Trainee(model, optimizer, lambda: step(next(numbers)))


def loss_of(model: nn.Module, worker: int, number: int) -> Tensor:
    x = batch(worker, number)
    loss: Tensor = (model(x) - x.sum(1, keepdim=True).sin()).pow(2).mean()
    return loss


def lbfgs(worker: int) -> Trainee:
    """It calls its closure many times in one step."""
    model = an_mlp(worker).model
    optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def step(number: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, worker, number)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]

    return looped(model, optimizer, step)


def gan(worker: int) -> Trainee:
    """Two optimizers on parts of a model, of which one is given: the generator's, Muon.

    The critic makes three steps for each of its steps.
    """
    model = an_mlp(worker).model
    matrices = [model.get_parameter(f"{layer}.weight") for layer in (2, 4)]
    rest = [p for p in model.parameters() if all(p is not each for each in matrices)]
    critic, generator = optim.RMSprop(rest, lr=0.005), optim.Muon(matrices, lr=0.01)

    def step(number: int) -> None:
        for turn, optimizer in enumerate((critic, critic, critic, generator)):
            model.zero_grad()
            loss = loss_of(model, worker, 4 * number + turn)
            (-loss if optimizer is generator else loss).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return looped(model, generator, step)


class ClippedSGD(optim.SGD):
    """A user's own optimizer: it does something and calls the step of its parent."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


def derived(worker: int) -> Trainee:
    """Once a plain SGD exists, torch calls the hooks of a ClippedSGD in both methods."""
    optim.SGD([torch.zeros(1)])
    model = an_mlp(worker).model
    optimizer = ClippedSGD(model.parameters(), lr=0.05)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, worker, number).backward()  # type: ignore[no-untyped-call]
        if number == 3:  # a step that fails must not throw off the count of those that follow
            with pytest.raises(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)
        optimizer.step()

    return looped(model, optimizer, step)


@pytest.mark.parametrize("make", [lbfgs, gan, derived])
def test_run_of_unusual_optimizers_is_the_loop_bit_for_bit(make: Callable[[int], Trainee]) -> None:
    equals_the_loop(make)
