"""The role "trainer": a GPT-shaped model, an optimizer, and the hook, as in a training script.

Where only the exchange is measured nothing is trained: parameters drift a little before each round.
So there are no gradients, which would take up the memory of a small machine.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from diloco_tools.bench import machine
from diloco_tools.bench.report.arithmetic import moments
from diloco_tools.bench.sizes import CONTEXT, SIZES, VOCABULARY, Shape
from diloco_tools.demo.model import GPT, GPTConfig, build_model
from diloco_worker import DiLoCoWorker

SAMPLE_S = 0.0005  # between two looks at the counters
DRIFT = 0.999  # what parameters are multiplied by before a round, so that there is a difference
START = 0.02  # the value of every parameter where nothing is trained
BATCH = 1  # windows in a step of real training: a tenth of a second for 10M parameters


class Nothing(Optimizer):
    """An optimizer whose step changes nothing, so that the hook begins when it is called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Only the hooks behind it do something."""


def shape_of(size: str) -> GPTConfig:
    shape = SIZES[size]
    return GPTConfig(CONTEXT, shape.width, shape.layers, shape.heads)


class StillGPT(nn.Module):
    """The parameters of the demo's GPT and nothing else, all of one value: random ones take seconds."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        sizes = {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}  # in widths
        self.embedding = _filled(VOCABULARY, width)
        self.position = _filled(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.ParameterDict({n: _filled(a * width, b * width) for n, (a, b) in sizes.items()})
            for _ in range(shape.layers)
        )


def _filled(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.full((rows, columns), START))


@contextlib.contextmanager
def sampling(diloco: DiLoCoWorker) -> Iterator[list[tuple[float, int, int]]]:
    """Writes down time and the hook's counters of bytes up and down every half a millisecond."""
    samples: list[tuple[float, int, int]] = []
    is_over = threading.Event()

    def sample() -> None:
        counters = diloco.sync_metrics
        samples.append((time.monotonic(), counters.bytes_up, counters.bytes_down))

    def run() -> None:
        while not is_over.wait(SAMPLE_S):
            sample()

    sample()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield samples
    is_over.set()
    thread.join()
    sample()


class Trainer:
    """One worker after the other, in one process."""

    def __init__(self, _: object) -> None:
        torch.set_num_threads(1)
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._diloco: DiLoCoWorker | None = None
        self._before = machine.memory(os.getpid())
        self._began = 0.0
        self._mark: Any = None

    # Taking part.

    def build(self, size: str, trains: bool = False) -> None:
        """A model and its optimizer; the worker's memory counts from here."""
        self._model = self._optimizer = None
        machine.give_back()
        if trains:
            self._model = build_model(0, shape_of(size))
            self._optimizer = AdamW(self._model.parameters(), lr=1e-4)
        else:
            self._model = StillGPT(SIZES[size])
            self._optimizer = Nothing(self._model)
        machine.give_back()
        machine.forget_peak(os.getpid())
        self._before = machine.memory(os.getpid())

    def join(self, server: str, worker_id: str) -> None:
        """Join a run with the model at hand; it gets the run's parameters."""
        assert self._model is not None and self._optimizer is not None
        # Registered before the hook's own, so it is called before it.
        self._mark = self._optimizer.register_step_post_hook(self._note)
        self._diloco = DiLoCoWorker(
            self._model, self._optimizer, server=server, worker_id=worker_id
        )
        self._diloco.start()

    def leave(self) -> None:
        """Leave the run; the memory of the model is free for others."""
        self._it.close()
        self._mark.remove()
        self._diloco = self._mark = self._model = self._optimizer = None
        machine.give_back()

    def memory(self) -> dict[str, Any]:
        """Bytes at the peak beyond what there was before joining."""
        return {"beyond": machine.memory(os.getpid()).peak - self._before.resident}

    @property
    def _it(self) -> DiLoCoWorker:
        assert self._diloco is not None, "it has not joined"
        return self._diloco

    def _note(self, *_: object) -> None:
        self._began = time.monotonic()

    # Measuring.

    def drift(self) -> None:
        """What training would have done to the parameters, before the clock runs."""
        assert self._model is not None
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(DRIFT)

    def round(self, sampled: bool = False) -> dict[str, Any]:
        """One step with a boundary behind it: from its beginning until the reply is in the model."""
        assert self._optimizer is not None
        before = self._it.sync_metrics
        with contextlib.ExitStack() as stack:
            samples = stack.enter_context(sampling(self._it)) if sampled else []
            self._optimizer.step()
            ended = time.monotonic()
        after = self._it.sync_metrics
        if after.rounds != before.rounds + 1:
            raise RuntimeError(f"the round did not count: {after.last_error}")
        found = moments(samples, self._began, ended)
        return {
            "began": self._began,
            "ended": ended,
            "bytes_up": after.bytes_up - before.bytes_up,
            "bytes_down": after.bytes_down - before.bytes_down,
            "moments": None if found is None else asdict(found),
        }

    def rounds_for(self, seconds: float) -> dict[str, Any]:
        """As many rounds as fit, one after the other, with nothing in between."""
        began, rounds, found = time.monotonic(), 0, {"bytes_up": 0, "bytes_down": 0}
        while time.monotonic() < began + seconds:
            one = self.round()
            rounds += 1
            found = {name: found[name] + one[name] for name in found}
        return {"began": began, "ended": time.monotonic(), "rounds": rounds, **found}

    def train(self, steps: int) -> dict[str, Any]:
        """Train on random bytes; seconds of each step, and of the hook within it."""
        assert isinstance(self._model, GPT) and self._optimizer is not None
        whole, hook = [], []
        for _ in range(steps):
            began = time.monotonic()
            stepped, ended = _step(self._model, self._optimizer, self._it)
            whole.append(ended - began)
            hook.append(stepped - self._began)
        return {"steps": whole, "hook": hook, "copy": self._copy_seconds()}

    def compare(self, size: str, server: str, steps: int) -> dict[str, Any]:
        """Steps of one model without a hook and of another with it, in turn; seconds of each."""
        self.build(size, trains=True)
        self.join(server, "attached")
        assert isinstance(self._model, GPT) and self._optimizer is not None
        plain = build_model(0, shape_of(size))
        optimizer = AdamW(plain.parameters(), lr=1e-4)
        found: dict[str, list[float]] = {"without": [], "attached": []}
        for i in range(steps + 2):
            # Each goes first every second time, so that neither always follows the other.
            for which in ("attached", "without") if i % 2 else ("without", "attached"):
                began = time.monotonic()
                if which == "attached":
                    _, ended = _step(self._model, self._optimizer, self._it)
                else:
                    _, ended = _step(plain, optimizer, None)
                found[which].append(ended - began)
        self.leave()
        return {which: seconds[2:] for which, seconds in found.items()}

    def _copy_seconds(self) -> float:
        """To copy all parameters once, to memory that is there already."""
        assert self._model is not None
        parameters = [p.detach() for p in self._model.parameters()]
        copies = [torch.empty_like(p).copy_(p) for p in parameters]
        found = []
        for _ in range(5):
            began = time.monotonic()
            for source, target in zip(parameters, copies, strict=True):
                target.copy_(source)
            found.append(time.monotonic() - began)
        return statistics.median(found)


def _step(model: GPT, optimizer: Optimizer, diloco: DiLoCoWorker | None) -> tuple[float, float]:
    """One step of training; when the optimizer and its hooks were done with it, and when all was."""
    tokens: Tensor = torch.randint(VOCABULARY, (BATCH, CONTEXT))
    loss = model.loss(tokens, tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    stepped = time.monotonic()
    optimizer.zero_grad()
    if diloco is not None:
        diloco.report(loss=loss.detach(), tokens=BATCH * CONTEXT)
    return stepped, time.monotonic()
