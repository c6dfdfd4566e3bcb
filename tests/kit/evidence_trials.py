"""Small trials of the evidence, and a loop without any broker that they are held against."""

from collections.abc import Mapping
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
    Buffered,
    DelayedNesterov,
    Outer,
    Plan,
    State,
    Trainee,
    difference,
    nesterov,
    put,
    state_of,
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


def outer_step(kind: str, workers: int, eta: float, mu: float) -> Outer:
    """The outer optimizers in plain torch, from the papers."""
    momentum = nesterov(eta, mu)(0)
    made: dict[str, Outer] = {
        "nesterov": momentum,
        "paper": DelayedNesterov(eta, mu, workers),
        "direct": Buffered(momentum, workers, direct=eta),
        "fedbuff": Buffered(momentum, workers),
    }
    return made[kind]


def in_bf16(_: int, delta: State) -> State:
    """A delta as it travels."""
    return {name: value.bfloat16().float() for name, value in delta.items()}


class Replica(Trainee):
    """A worker as a plain model; `places` of the learning rate's schedule, one for each step."""

    def __init__(self, trial: Trial, number: int, text: Text) -> None:
        model = build_model(trial.seed, TINY_MODEL)
        super().__init__(model, build_optimizer(model, trial.recipe), self._step)
        self.trial, self.places = trial, iter(range(trial.steps))
        seed = batch_seed(trial.seed, number)
        self.batches = training_batches(text.shards[number], trial.batch, TINY_MODEL.context, seed)

    def _step(self) -> None:
        factor = learning_rate_factor(self.trial.recipe, next(self.places))
        self.optimizer.param_groups[0]["lr"] = self.trial.lr * factor
        self.model.loss(*next(self.batches)).backward()  # type: ignore[operator]
        clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad()


def without_a_broker(
    trial: Trial, text: Text, kind: str, weights: Mapping[int, list[float]] | None = None
) -> State:
    """The global parameters at the end. `weights` of the workers, by round; else all alike."""
    replicas = [Replica(trial, number, text) for number in range(trial.workers)]
    given = trial.options
    outer = outer_step(kind, trial.workers, given["outer_lr"], given["outer_momentum"])
    if trial.is_async:
        return _in_virtual_time(trial, replicas, outer)

    def weight(worker: int, step: int) -> int:
        return 1 if weights is None else int(weights[step // trial.sync_every][worker])

    plan = Plan(trial.sync_every, [list(state_of(replicas[0].model))])
    ended = streaming(replicas, trial.steps, plan, lambda _: outer, report=weight, travels=in_bf16)
    return ended.final


def _in_virtual_time(trial: Trial, replicas: list[Replica], outer: Outer) -> State:
    steps = [trial.steps_between(number) for number in range(trial.workers)]
    total, made = trial.steps * trial.workers, 0
    begun = [0.0] * trial.workers
    theta = state_of(replicas[0].model)
    bases = [theta] * trial.workers
    for _, number in virtual_order(trial.speeds, steps):
        count, replica = steps[number], replicas[number]
        ends = min(1.0, made / total + count / total)
        span = ends - begun[number]
        replica.places = iter(
            int(trial.steps * (begun[number] + span * k / count)) for k in range(count)
        )
        for _ in range(count):
            replica.step()
        theta = theta | outer(theta, in_bf16(number, difference(bases[number], replica.model)))
        put(replica.model, theta)
        bases[number] = theta
        begun[number] = ends
        made += count
        if made >= total:
            break
    return theta


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
