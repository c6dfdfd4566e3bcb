"""The role "trainer": a GPT, an optimizer, and the hook, as in a training script.

Where only the exchange is measured nothing is trained: parameters drift a little before each round.
So there are no gradients, which would take up the memory of a small machine.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from diloco_lab.bench.report.arithmetic import phases
from diloco_lab.bench.sizes import CONTEXT, SIZES
from diloco_lab.driver import machine
from diloco_tools.demo.model import GPT, VOCABULARY, GPTConfig, build_model
from diloco_worker import DiLoCoWorker

SAMPLE_S = 0.0005  # between two looks at the counters
NOISE = 1 << 23  # normal values that pseudo-gradients are made of: many times a chunk
NOISE_SCALE = 1e-3  # their standard deviation: that of a parameter over some hundred inner steps
DRIFT = 0.999  # what parameters are multiplied by before a round, so that there is a difference
START = 0.02  # the value of every parameter where nothing is trained
BATCH = 1  # windows in a step of real training: a tenth of a second for 10M parameters


class Nothing(Optimizer):
    """An optimizer whose step changes nothing, so that the hook begins when it is called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Only the hooks behind it do something."""


def training_model(size: str) -> tuple[GPT, Optimizer]:
    model = build_model(0, GPTConfig(CONTEXT, *SIZES[size]))
    return model, AdamW(model.parameters(), lr=1e-4)


def still_model(size: str) -> nn.Module:
    """The parameters of such a GPT, all of one value: random ones take seconds."""
    width, layers, _ = SIZES[size]
    shapes = [(VOCABULARY, width), (CONTEXT, width)]
    shapes += [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
    return nn.ParameterList(torch.full(shape, START) for shape in shapes)


class Trainer:
    """One worker after the other, in one process."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        torch.set_num_threads(1)
        self._is_asked = is_asked  # for something else, while an action goes on
        self._model: Any  # a GPT, or the parameters of one
        self._optimizer: Optimizer
        self._diloco: DiLoCoWorker
        self._resident = 0  # bytes, before joining
        self._began = 0.0  # when the hook was called last
        self._noise: torch.Tensor | None = None

    def meet(self, port: int, rank: int, count: int) -> None:
        """Be one of the processes of a worker, as a launcher would have them."""
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count
        )

    def build(self, size: str, trains: bool = False) -> None:
        """A model and its optimizer; the worker's memory counts from here."""
        if trains:
            self._model, self._optimizer = training_model(size)
        else:
            self._model = still_model(size)
            self._optimizer = Nothing(self._model)
        machine.give_back()
        machine.forget_peak(os.getpid())
        self._resident = machine.resident(os.getpid())

    def join(self, address: str, keys: str | None = None, together: bool = False) -> None:
        """Join a run with the model at hand; it gets the run's parameters.

        `keys` is a key file. `together`: with those whom it has met, as one worker.
        """
        # Registered before the hook's own, so it is called before it.
        self._optimizer.register_step_post_hook(self._note)
        self._diloco = DiLoCoWorker(
            self._model,
            self._optimizer,
            server=address,
            keys=keys,
            process_group="world" if together else None,
        )
        self._diloco.start()

    def leave(self) -> None:
        """Leave the run; the memory of the model is free for others."""
        self._diloco.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        del self._diloco, self._model, self._optimizer
        machine.give_back()

    def memory(self) -> dict[str, Any]:
        """Bytes at the peak beyond what there was before joining."""
        return {"beyond": machine.peak(os.getpid()) - self._resident}

    def _note(self, *_: object) -> None:
        self._began = time.monotonic()

    @torch.no_grad()
    def drift(self, normal: bool = False) -> None:
        """What training would have done to the parameters, before the clock runs.

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

    def round(self, sampled: bool = False) -> dict[str, Any]:
        """One step with a boundary behind it: from its beginning until the reply is in the model.

        With `sampled` the hook's counters of bytes are written down every half a millisecond.
        """
        before = self._diloco.sync_metrics
        samples: list[tuple[float, int, int]] = []
        is_over = threading.Event()

        def sample() -> None:
            is_last = False
            while not is_last:
                is_last = is_over.wait(SAMPLE_S)
                counters = self._diloco.sync_metrics
                samples.append((time.monotonic(), counters.bytes_up, counters.bytes_down))

        thread = threading.Thread(target=sample, daemon=True)
        if sampled:
            samples.append((time.monotonic(), before.bytes_up, before.bytes_down))
            thread.start()
        self._optimizer.step()
        ended = time.monotonic()
        if sampled:
            is_over.set()
            thread.join()
        after = self._diloco.sync_metrics
        if after.rounds != before.rounds + 1:
            raise RuntimeError(f"the round did not count: {after.last_error}")
        return {
            "began": self._began,
            "ended": ended,
            "up": after.bytes_up - before.bytes_up,
            "down": after.bytes_down - before.bytes_down,
            "phases": phases(samples, self._began, ended),
        }

    def rounds_for(self, seconds: float) -> dict[str, Any]:
        """As many rounds as fit, one after the other, with nothing in between."""
        began, rounds, moved = time.monotonic(), 0, 0
        while time.monotonic() < began + seconds:
            found = self.round()
            moved += found["up"] + found["down"]
            rounds += 1
        return {"began": began, "ended": time.monotonic(), "rounds": rounds, "bytes": moved}

    def simulate(self, steps: int, step_s: float, drift_every: int) -> dict[str, Any]:
        """Steps of this length that change the parameters, as training does, with the hook behind each.

        Args:
            steps: how many.
            step_s: seconds of each; what the change itself takes is part of them.
            drift_every: the parameters change in the first of so many steps: before each boundary.

        Returns:
            When it began and ended, how long the hook held up each step, how long it takes to copy all
            parameters once, all in s; and how many steps behind its slot the last reply was merged.
        """
        began, waited = time.monotonic(), []
        for number in range(steps):
            due = time.monotonic() + step_s
            if number % drift_every == 0:
                self.drift(normal=True)
            time.sleep(max(0.0, due - time.monotonic()))
            self._optimizer.step()
            waited.append(time.monotonic() - self._began)
        delay = self._diloco.sync_metrics.merge_delay
        found = {"began": began, "ended": time.monotonic(), "waited": waited, "delay": delay}
        return found | {"copy": self._copy_seconds()}

    def go_on(self, step_s: float, drift_every: int) -> dict[str, Any]:
        """Steps as in `simulate`, until something else is asked for. Returns how many."""
        number = 0
        while not self._is_asked():
            if number % drift_every == 0:
                self.drift(normal=True)
            time.sleep(step_s)
            self._optimizer.step()
            number += 1
        return {"steps": number}

    def train(self, steps: int) -> dict[str, Any]:
        """Train on random bytes; seconds of each step, and of the hook within it."""
        whole, hook = [], []
        for _ in range(steps):
            began = time.monotonic()
            stepped = _step(self._model, self._optimizer, self._diloco)
            whole.append(time.monotonic() - began)
            hook.append(stepped - self._began)
        return {"steps": whole, "hook": hook, "copy": self._copy_seconds()}

    def compare(self, size: str, address: str, steps: int) -> dict[str, Any]:
        """Steps of one model without a hook and of another with it, in turn; seconds of each."""
        self.build(size, trains=True)
        self.join(address)
        ways = {
            "without": (*training_model(size), None),
            "attached": (self._model, self._optimizer, self._diloco),
        }
        found: dict[str, list[float]] = {which: [] for which in ways}
        for i in range(steps + 2):
            # Each goes first every second time, so that neither always follows the other.
            for which in sorted(ways, reverse=i % 2 == 0):
                began = time.monotonic()
                _step(*ways[which])
                found[which].append(time.monotonic() - began)
        del ways
        self.leave()
        return {which: seconds[2:] for which, seconds in found.items()}

    def _copy_seconds(self) -> float:
        """To copy all parameters once, to memory that is there already."""
        parameters = [p.detach() for p in self._model.parameters()]
        copies = [torch.empty_like(p).copy_(p) for p in parameters]
        found = []
        for _ in range(5):
            began = time.monotonic()
            for source, target in zip(parameters, copies, strict=True):
                target.copy_(source)
            found.append(time.monotonic() - began)
        return statistics.median(found)


def _step(model: Any, optimizer: Optimizer, diloco: DiLoCoWorker | None) -> float:
    """One step of training; when the optimizer and its hooks were done with it."""
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT))
    loss = model.loss(tokens, tokens)
    loss.backward()
    optimizer.step()
    stepped = time.monotonic()
    optimizer.zero_grad()
    if diloco is not None:
        diloco.report(loss=loss.detach(), tokens=BATCH * CONTEXT)
    return stepped
