"""The role "trainer": a GPT, an optimizer, and the hook, as in a training script.

Where only the exchange is measured nothing is trained: parameters drift a little before each round.
So there are no gradients, which would take up the memory of a small machine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from diloco_lab.bench.sizes import CONTEXT, SIZES
from diloco_lab.driver import machine
from diloco_tools.demo.model import VOCABULARY, GPTConfig, build_model
from diloco_worker import DiLoCoWorker

NOISE = 1 << 23  # normal values of pseudo-gradients: many times a chunk
NOISE_SCALE = 1e-3  # their standard deviation: that of a parameter over some hundred inner steps
DRIFT = 0.999  # factor of the parameters before a round
START = 0.02  # the value of every untrained parameter
BATCH = 1  # windows in a step of real training: a tenth of a second for 10M parameters


class Nothing(Optimizer):
    """An optimizer whose step changes nothing, so that the hook begins when it is called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Only its hooks do something."""


def still_model(size: str) -> nn.Module:
    """The parameters of such a GPT, all of one value: random ones take seconds."""
    width, layers, _ = SIZES[size]
    shapes = [(VOCABULARY, width), (CONTEXT, width)]
    shapes += [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
    return nn.ParameterList(torch.full(shape, START) for shape in shapes)


class Trainer:
    """One worker at a time, in one process."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        torch.set_num_threads(1)
        self._is_asked = is_asked  # whether the next request has arrived
        self._model: Any  # a GPT, or the parameters of one
        self._optimizer: Optimizer
        self._diloco: DiLoCoWorker
        self._resident = 0  # bytes, before joining
        self._began = 0.0  # when the hook was called last
        self._noise: torch.Tensor | None = None

    def build(self, size: str, trains: bool = False) -> None:
        """Build a model and its optimizer; the worker's memory counts from here."""
        if trains:
            self._model = build_model(0, GPTConfig(CONTEXT, *SIZES[size]))
            self._optimizer = AdamW(self._model.parameters(), lr=1e-4)
        else:
            self._model = still_model(size)
            self._optimizer = Nothing(self._model)
        machine.give_back()
        machine.forget_peak(os.getpid())
        self._resident = machine.resident(os.getpid())

    def join(self, address: str, keys: str | None = None) -> None:
        """Join a run with the built model, which gets the run's parameters. `keys` is a key file."""
        # Registered before the hook's own, so it is called first.
        self._optimizer.register_step_post_hook(self._note)
        self._diloco = DiLoCoWorker(self._model, self._optimizer, server=address, keys=keys)
        self._diloco.start()

    def leave(self) -> None:
        """Leave the run and free the memory of the model."""
        self._diloco.close()
        del self._diloco, self._model, self._optimizer
        machine.give_back()

    def memory(self) -> dict[str, Any]:
        """Peak memory in bytes beyond that before joining."""
        return {"beyond": machine.peak(os.getpid()) - self._resident}

    def _note(self, *_: object) -> None:
        self._began = time.monotonic()

    @torch.no_grad()
    def drift(self, normal: bool = False) -> None:
        """Change the parameters as training would have, before the clock runs.

        `normal`: by normal values, other ones at each worker and in each round, as a codec needs them
        whose size depends on what it packs. They are pieces of one vector, from anywhere in it.
        """
        if not normal:
            for parameter in self._model.parameters():
                parameter.mul_(DRIFT)
            return
        if self._noise is None:
            generator = torch.Generator().manual_seed(os.getpid())
            self._noise = torch.randn(NOISE, generator=generator).mul_(NOISE_SCALE)
        for parameter in self._model.parameters():
            for piece in parameter.view(-1).split(NOISE // 2):
                start = int(torch.randint(NOISE // 2, ()))
                piece.add_(self._noise[start : start + piece.numel()])

    def round(self) -> dict[str, Any]:
        """One step with a boundary: from its beginning until the reply is in the model."""
        before = self._diloco.sync_metrics
        self._optimizer.step()
        ended = time.monotonic()
        after = self._diloco.sync_metrics
        if after.pushes != before.pushes + 1:
            raise RuntimeError(f"the round did not count: {after.last_error}")
        return {
            "began": self._began,
            "ended": ended,
            "up": after.bytes_up - before.bytes_up,
            "down": after.bytes_down - before.bytes_down,
        }

    def simulate(self, steps: int | None, step_s: float, drift_every: int) -> dict[str, Any]:
        """Steps of this length that change the parameters, as training does, each followed by the hook.

        Args:
            steps: their number; None: until the next request.
            step_s: seconds of each, with the change.
            drift_every: the parameters change in one of this many steps, before each boundary.

        Returns:
            The seconds by which the hook delayed each step, the seconds of one copy of all parameters,
            and the steps by which the last reply was merged late.
        """
        waited: list[float] = []
        while not self._is_asked() if steps is None else len(waited) < steps:
            due = time.monotonic() + step_s
            if len(waited) % drift_every == 0:
                self.drift(normal=True)
            time.sleep(max(0.0, due - time.monotonic()))
            self._optimizer.step()
            waited.append(time.monotonic() - self._began)
        delay = self._diloco.sync_metrics.merge_delay
        return {"waited": waited, "delay": delay, "copy": self._copy_seconds()}

    def train(self, steps: int) -> dict[str, Any]:
        """Train on random bytes; seconds of each step, of the hook within it, and of its report."""
        whole, hook, reports = [], [], []
        for _ in range(steps):
            began = time.monotonic()
            tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT))
            loss = self._model.loss(tokens, tokens)
            loss.backward()
            self._optimizer.step()
            hook.append(time.monotonic() - self._began)
            self._optimizer.zero_grad()
            stepped = time.monotonic()
            self._diloco.report(loss=loss.detach(), tokens=BATCH * CONTEXT)
            reports.append(time.monotonic() - stepped)
            whole.append(time.monotonic() - began)
        return {"steps": whole, "hook": hook, "reports": reports, "copy": self._copy_seconds()}

    def _copy_seconds(self) -> float:
        """The seconds of one copy of all parameters, to allocated memory."""
        parameters = [p.detach() for p in self._model.parameters()]
        copies = [torch.empty_like(p).copy_(p) for p in parameters]
        found = []
        for _ in range(5):
            began = time.monotonic()
            for source, target in zip(parameters, copies, strict=True):
                target.copy_(source)
            found.append(time.monotonic() - began)
        return statistics.median(found)
