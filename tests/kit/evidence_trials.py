"""Small trials of the evidence, and the loops without a broker that they are held against."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
from torch.nn.utils import clip_grad_norm_

from diloco_lab.evidence.training import virtual_order
from diloco_lab.evidence.trial import MODELS, Trial
from diloco_tools.demo.data import Text, batch_seed, load_text, training_batches
from diloco_tools.demo.model import (
    LARGEST_GRADIENT,
    GPTConfig,
    build_model,
    build_optimizer,
    learning_rate_factor,
)
from kit.reference import (
    DelayedNesterov,
    Plan,
    Report,
    State,
    Trainee,
    asynchronous,
    nesterov,
    streaming,
)

TINY_MODEL = GPTConfig(context=16, width=16, layers=4, heads=2)
SPEEDS = (0.58, 0.75, 1.51, 3.33)
TINY = Trial(model="tiny", steps=8, sync_every=2, batch=2, windows=8, lr=3e-3)


def with_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials can name the model "tiny" from here on."""
    monkeypatch.setitem(cast(dict[str, GPTConfig], MODELS), "tiny", TINY_MODEL)


def a_text(trial: Trial) -> Text:
    return load_text(None, trial.workers, TINY_MODEL.context, trial.windows)


def a_trainee(trial: Trial, number: int, text: Text, rounds: Sequence[Sequence[int]]) -> Trainee:
    """Its step is a whole round: inner steps at these places of the learning rate's schedule."""
    model = build_model(trial.seed, TINY_MODEL)
    optimizer = build_optimizer(model, trial.recipe)
    seed = batch_seed(trial.seed, number)
    batches = training_batches(text.shards[number], trial.batch, TINY_MODEL.context, seed)
    left = iter(rounds)

    def step() -> None:
        for place in next(left):
            rate = trial.lr * learning_rate_factor(trial.recipe, place)
            optimizer.param_groups[0]["lr"] = rate
            model.loss(*next(batches)).backward()  # type: ignore[no-untyped-call]
            clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
            optimizer.step()
            optimizer.zero_grad()

    return Trainee(model, optimizer, step)


def without_a_broker(trial: Trial, text: Text, weight: Report | None = None) -> State:
    """The global parameters at the end. `weight` of a worker in a round; else all weigh alike."""
    eta, mu = trial.options["outer_lr"], trial.options["outer_momentum"]
    every, order = trial.sync_every, list[int]()
    rounds: list[list[Sequence[int]]] = [
        [range(n * every, (n + 1) * every) for n in range(trial.rounds)]
        for _ in range(trial.workers)
    ]
    if trial.is_async:
        rounds, order = in_virtual_time(trial)
    made = [a_trainee(trial, number, text, rounds[number]) for number in range(trial.workers)]
    names = [name for name, _ in made[0].model.named_parameters()]
    plan = Plan(1, [names])
    if trial.is_async:
        delayed = lambda _: DelayedNesterov(eta, mu, trial.workers)  # noqa: E731
        outcome, _ = asynchronous(made, order, plan, delayed, [0] * trial.workers)
    else:
        outcome = streaming(
            *(made, trial.rounds, plan, nesterov(eta, mu)),
            report=weight,
            travels=lambda _, delta: {n: each.bfloat16().float() for n, each in delta.items()},
        )
    return {name: outcome.final[name] for name in names}


def in_virtual_time(trial: Trial) -> tuple[list[list[Sequence[int]]], list[int]]:
    """The places of each worker's rounds, and which worker ends one, in order."""
    steps = [trial.steps_between(number) for number in range(trial.workers)]
    total, made = trial.steps * trial.workers, 0
    rounds: list[list[Sequence[int]]] = [[] for _ in steps]
    order: list[int] = []
    begun = [0.0] * trial.workers
    for _, number in virtual_order(trial.speeds, steps):
        count = steps[number]
        ends = min(1.0, made / total + count / total)
        span = ends - begun[number]
        rounds[number].append(
            [int(trial.steps * (begun[number] + span * k / count)) for k in range(count)]
        )
        order.append(number)
        begun[number] = ends
        made += count
        if made >= total:
            break
    return rounds, order


def options(**changes: Any) -> dict[str, Any]:
    """An outer optimizer that is not the usual one."""
    return {"outer_lr": 0.6, "outer_momentum": 0.8, **changes}


def a_result(trial: Trial, loss: float | None, ends: float = 100.0) -> dict[str, Any]:
    curve = [[0, 0.0, 5.5], [50, ends / 2, 3.0], [trial.steps, ends, loss]]
    return {
        "trial": trial.plain(),
        "loss": loss,
        "curve": curve,
        "seconds": 1.0,
        "bytes_up": 1000,
        "bytes_down": 2000,
        "pushes": 1,
        "lost": 0,
        "rejected": 0,
        "staleness": 0.0,
        "versions": {"torch": "2.0", "python": "3.12"},
    }
