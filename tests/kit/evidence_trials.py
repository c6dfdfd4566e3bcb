"""Small trials of the evidence, and a loop without any broker that they are held against."""

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
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
from kit.reference import Buffered, DelayedNesterov, Outer, State, nesterov

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


class Replica:
    """A worker as a plain model."""

    def __init__(self, trial: Trial, number: int, text: Text) -> None:
        self.trial = trial
        self.model = build_model(trial.seed, TINY_MODEL)
        self.optimizer = build_optimizer(self.model, trial.recipe)
        seed = batch_seed(trial.seed, number)
        self.batches = training_batches(text.shards[number], trial.batch, TINY_MODEL.context, seed)
        self.base = self.state

    @property
    def state(self) -> State:
        return {name: each.detach().clone() for name, each in self.model.named_parameters()}

    def train(self, places: list[int]) -> None:
        """A step at each of these places of the learning rate's schedule."""
        for place in places:
            factor = learning_rate_factor(self.trial.recipe, place)
            self.optimizer.param_groups[0]["lr"] = self.trial.lr * factor
            self.model.loss(*next(self.batches)).backward()  # type: ignore[no-untyped-call]
            clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def delta(self) -> State:
        """As it travels in bf16."""
        now = self.state
        return {name: (self.base[name] - now[name]).bfloat16().float() for name in now}

    def take(self, theta: State) -> None:
        self.model.load_state_dict(theta)
        self.base = self.state


def without_a_broker(
    trial: Trial, text: Text, kind: str, weights: Mapping[int, list[float]] | None = None
) -> State:
    """The global parameters at the end. `weights` of the workers, by round; else all alike."""
    replicas = [Replica(trial, number, text) for number in range(trial.workers)]
    theta = replicas[0].state
    given = trial.options
    outer = outer_step(kind, trial.workers, given["outer_lr"], given["outer_momentum"])
    if trial.is_async:
        _in_virtual_time(trial, replicas, theta, outer)
        return theta
    for number in range(trial.rounds):
        places = [number * trial.sync_every + step for step in range(trial.sync_every)]
        for replica in replicas:
            replica.train(places)
        voices = (weights or {}).get(number, [1.0] * trial.workers)
        deltas = [replica.delta for replica in replicas]
        mean = {
            name: sum((w * d[name] for w, d in zip(voices, deltas, strict=True)), torch.zeros(()))
            / sum(voices)
            for name in theta
        }
        theta |= outer(theta, mean)
        for replica in replicas:
            replica.take(theta)
    return theta


def _in_virtual_time(trial: Trial, replicas: list[Replica], theta: State, outer: Outer) -> None:
    steps = [trial.steps_between(number) for number in range(trial.workers)]
    total, made = trial.steps * trial.workers, 0
    begun = [0.0] * trial.workers
    for _, number in virtual_order(trial.speeds, steps):
        count = steps[number]
        ends = min(1.0, made / total + count / total)
        span = ends - begun[number]
        places = [int(trial.steps * (begun[number] + span * k / count)) for k in range(count)]
        replicas[number].train(places)
        theta |= outer(theta, replicas[number].delta)
        replicas[number].take(theta)
        begun[number] = ends
        made += count
        if made >= total:
            return


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
