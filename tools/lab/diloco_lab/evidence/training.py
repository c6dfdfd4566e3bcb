"""One DiLoCo run in one process: a real broker, and real workers that take turns to compute.

Broker and workers are the usual ones, over TCP on this machine; only the order in which they compute is
simulated. So a run gives the same bits as one of separate processes, and many runs fit on a machine.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cache
from heapq import merge
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Muon, Optimizer

from diloco_broker import Broker, BrokerConfig
from diloco_lab.evidence.trial import MODELS, Trial
from diloco_tools.demo import model as gpt
from diloco_tools.demo.data import Text, batch_seed, load_text, training_batches
from diloco_worker import DiLoCoClient, DiLoCoWorker, WorkerOptions

# Seconds that one worker may wait for another, on a busy machine; then something hangs.
PATIENCE_S = 3600.0


class Stuck(Exception):
    """A worker has waited for too long for the others."""


class Broken(Exception):
    """Another worker has failed: waiting is useless."""


def virtual_order(speeds: Sequence[float], steps: Sequence[int]) -> Iterator[tuple[float, int]]:
    """Seconds, and the worker that completes its H steps then, endlessly; of two the lower number first.

    >>> order = virtual_order([1.0, 2.0], [10, 10])
    >>> [next(order) for _ in range(4)]
    [(5.0, 1), (10.0, 0), (10.0, 1), (15.0, 1)]
    """

    def ends(worker: int) -> Iterator[tuple[float, int]]:
        return ((number * steps[worker] / speeds[worker], worker) for number in count(1))

    return merge(*(ends(worker) for worker in range(len(speeds))))


class Baton:
    """Goes from worker to worker in the order of virtual time, for H steps and their exchange.

    Args:
        speeds, steps: of each worker: steps a second, and H.
        total: steps of all workers after which the run has ended.
    """

    def __init__(self, speeds: Sequence[float], steps: Sequence[int], total: int) -> None:
        self._order = virtual_order(speeds, steps)
        self._steps, self._total = steps, total
        self._changed = threading.Condition()
        self._broken = self._ended = False
        self.now, self._next = next(self._order)
        self.made = 0  # steps of all workers

    @property
    def share(self) -> float:
        """The completed share of the run."""
        return min(1.0, self.made / self._total)

    def wait_for(self, worker: int) -> bool:
        """Wait for this worker's turn; False if the run has ended."""
        with self._changed:
            is_due = self._changed.wait_for(
                lambda: self._broken or self._ended or self._next == worker, PATIENCE_S
            )
            if self._broken:
                raise Broken
            if not is_due:
                raise Stuck(f"worker {worker} had no turn within {PATIENCE_S:.0f} s")
            return not self._ended

    def pass_on(self) -> None:
        with self._changed:
            self.made += self._steps[self._next]
            if self.made >= self._total:
                self._ended = True  # and the clock stays
            else:
                self.now, self._next = next(self._order)
            self._changed.notify_all()

    def end(self, *, broken: bool = False) -> None:
        """End all turns."""
        with self._changed:
            self._ended = True
            self._broken = self._broken or broken
            self._changed.notify_all()


# Factors of harmful pseudo-gradients.
REVERSED, ENORMOUS = -3.0, 1000.0
# Tokens that a worker reports for each step: lost contributions weigh a billionth of the others.
KEPT, LOST = 1_000_000_000, 1
LOOK_S = 0.5  # between two checks for a failed worker


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        curve: (inner steps of each worker, on the mean; seconds, virtual or real; held-out loss of the
            global parameters in nats per byte, None where it is not finite).
        pushes: that were counted.
        staleness: mean number of versions between a push's base and the version it went into.
    """

    curve: list[tuple[int, float, float | None]] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0
    pushes: int = 0
    rejected: int = 0
    staleness: float = 0.0
    parameters: dict[str, Tensor] = field(default_factory=dict)


def inner_optimizers(model: gpt.GPT, trial: Trial) -> list[Optimizer]:
    if trial.inner != "muon":
        return [gpt.build_optimizer(model, trial.recipe)]
    # With its updates as large as AdamW's, one learning rate suits both.
    how: Any = {"weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    others = nn.ModuleList([model.embedding, model.position])
    muon = Muon(model.blocks.parameters(), lr=trial.lr, **how)
    return [muon, gpt.build_optimizer(others, trial.recipe)]


class Adapter(nn.Module):
    """W + B A, where B begins with zeros, and W stays (LoRA; Hu et al. 2021, arXiv 2106.09685)."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.randn(rank, columns) / math.sqrt(columns))
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


@cache
def first_trained(model: str) -> dict[str, Tensor]:
    """The parameters that fine-tuning begins with: one worker on the standard library's source."""
    trial = Trial(arm="alone", workers=1, model=model)
    text = load_text(None, 1, trial.recipe.context, trial.windows)
    return train_without_broker(trial, text).parameters


def model_of(trial: Trial) -> gpt.GPT:
    """The model at the beginning."""
    model = gpt.build_model(trial.seed, MODELS[trial.model])
    if trial.lora:
        model.load_state_dict(first_trained(trial.model))
        model.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(trial.seed)
            for layer in [each for each in model.blocks.modules() if isinstance(each, nn.Linear)]:
                parametrize.register_parametrization(
                    layer, "weight", Adapter(layer.weight, trial.lora)
                )
    return model


class DiLoCoRun:
    """A broker and its workers, from the first step to the last."""

    def __init__(self, trial: Trial, text: Text) -> None:
        self.trial, self.text = trial, text
        self.computing = threading.Lock()  # held by the worker that computes: all share one core
        self.baton: Baton | None = None
        if trial.is_async:
            speeds = trial.speeds or (1.0,) * trial.workers
            steps = [trial.steps_between(number) for number in range(trial.workers)]
            self.baton = Baton(speeds, steps, trial.steps * trial.workers)
        self.outcome = Outcome()
        self.together = threading.Barrier(trial.workers)
        self.is_over = threading.Event()
        self.stale: list[int] = []
        self._failures: list[BaseException] = []
        self._counting = threading.Lock()

    def go(self) -> Outcome:
        """Raise the error of a worker or the broker."""
        trial = self.trial
        judge = model_of(trial)
        first = gpt.validation_loss(judge, *self.text.validation)
        self.outcome.curve.append((0, 0.0, first))
        config = BrokerConfig(
            workers=trial.workers,
            sync_every=trial.sync_every,
            bind="tcp://127.0.0.1:*",
            feed="tcp://127.0.0.1:*",
            **trial.options,
        )
        with Broker(config) as broker, ExitStack() as stack:
            self.address = broker.address
            workers = [Worker(self, number) for number in range(trial.workers)]
            # A round waits for a worker that has failed in it, and waiting workers notice nothing else.
            threads = [
                threading.Thread(target=self._work, args=(each,), daemon=True) for each in workers
            ]
            for thread in threads:
                thread.start()
            stack.callback(self._end_all)
            for thread in threads:
                while thread.is_alive() and not self._failures:
                    thread.join(LOOK_S)
            if self._failures:
                raise self._failures[0]
            with DiLoCoClient(broker.address, timeout=PATIENCE_S) as reader:
                newest = reader.pull()
        outcome = self.outcome
        outcome.parameters = {name: value.clone() for name, value in newest.tensors.items()}
        judge.load_state_dict(newest.tensors)
        ended = outcome.curve[-1][2] is None  # it has diverged
        loss = None if ended else finite(gpt.validation_loss(judge, *self.text.validation))
        if outcome.curve[-1][0] == trial.steps:
            outcome.curve.pop()  # the final evaluation replaces it
        outcome.curve.append((trial.steps, self.now, loss))
        outcome.staleness = sum(self.stale) / len(self.stale) if self.stale else 0.0
        return outcome

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning; rounds are as slow as the slowest worker."""
        if self.baton is not None:
            return self.baton.now
        slowest = min(self.trial.speeds, default=1.0)
        return self.trial.steps / slowest

    def _work(self, worker: Worker) -> None:
        try:
            worker.work()
        except (Broken, threading.BrokenBarrierError):
            pass  # another one has failed
        except BaseException as error:  # noqa: BLE001  raised again by `go`
            self._failures.append(error)
            self.together.abort()
            self.is_over.set()
            if self.baton is not None:
                self.baton.end(broken=True)

    def _end_all(self) -> None:
        """Clean up after `go` was interrupted by a failure or Ctrl-C."""
        self.is_over.set()
        self.together.abort()
        if self.baton is not None:
            self.baton.end(broken=True)

    def sees(self, steps: int, seconds: float, loss: float) -> None:
        """A point of the curve. A run whose loss is not finite has ended."""
        self.outcome.curve.append((steps, seconds, finite(loss)))
        if not math.isfinite(loss):
            self.is_over.set()
            if self.baton is not None:
                self.baton.end()

    def adds(self, diloco: DiLoCoWorker) -> None:
        """The counters of a worker that has left."""
        metrics = diloco.sync_metrics
        with self._counting:
            self.outcome.bytes_up += metrics["bytes_up"]
            self.outcome.bytes_down += metrics["bytes_down"]
            self.outcome.pushes += metrics["pushes"]
            self.outcome.rejected += metrics["rejected"]


def lost_in(number: int, trial: Trial) -> set[int]:
    """The workers whose contribution to this round is lost; never all of them.

    They have computed in vain, and continue with the result of the others, as after a restart.
    """
    dice = random.Random(f"lost {trial.seed} {number}")
    lost = {worker for worker in range(trial.workers) if dice.random() < trial.drop}
    return lost - {dice.randrange(trial.workers)} if len(lost) == trial.workers else lost


class Worker:
    """One worker of a run, in a thread of its own."""

    def __init__(self, run: DiLoCoRun, number: int) -> None:
        trial = run.trial
        self.run, self.number, self.trial = run, number, trial
        self.model = model_of(trial)
        self.optimizers = inner_optimizers(self.model, trial)
        self.batches = training_batches(
            run.text.shards[number],
            trial.batch,
            trial.recipe.context,
            batch_seed(trial.seed, number),
        )
        self.step = 0
        self.computes = False
        self.harms = trial.harm if number == trial.workers - 1 else ""
        self.start: list[Tensor] = []  # the parameters at the beginning of a harmful worker's round
        # Before the hook of the DiLoCoWorker, which may wait for the others.
        self.optimizers[-1].register_step_post_hook(self._stepped)
        self.diloco = DiLoCoWorker(
            self.model,
            self.optimizers,
            run.address,
            worker_id=f"worker-{number}",
            sync_every=trial.steps_between(number) if trial.dylu else None,
            timeout=PATIENCE_S,
            options=WorkerOptions(handle_signals=False),
        )

    def work(self) -> None:
        self.diloco.start()
        try:
            self.run.together.wait(PATIENCE_S)
            if self.run.baton is not None:
                self._in_virtual_time(self.run.baton)
            else:
                self._in_rounds()
        except BaseException:
            self.diloco.close(failed=True)
            raise
        self.diloco.close()
        self.run.adds(self.diloco)

    # The order of the steps.

    def _in_rounds(self) -> None:
        for step in range(self.trial.steps):
            if self.run.is_over.is_set():
                return
            self._trains(step)
            self._looks()

    def _in_virtual_time(self, baton: Baton) -> None:
        """The learning rate follows the steps of all, which are spread evenly over each H steps."""
        trial, began = self.trial, 0.0
        steps = trial.steps_between(self.number)
        while baton.wait_for(self.number):
            ends = min(1.0, baton.share + steps / (trial.steps * trial.workers))
            for step in range(steps):
                self._trains(int(trial.steps * (began + (ends - began) * step / steps)))
            began = ends
            self.run.stale.append(self.diloco.sync_metrics["staleness"])
            # The points of the curve: after each `every` rounds' worth of steps.
            every = trial.every * trial.sync_every * trial.workers
            made = baton.made + steps
            if every and made // every > baton.made // every:
                self._evaluates(round(trial.steps * ends), baton.now)
            baton.pass_on()

    # A step, and its evaluation.

    def _trains(self, place: int) -> None:
        """One inner step, at this place of the learning rate's schedule, and its exchange."""
        trial = self.trial
        rate = trial.lr * gpt.learning_rate_factor(trial.recipe, place)
        for group in (group for each in self.optimizers for group in each.param_groups):
            group["lr"] = rate
        # The weight of its next push; see `lost_in`.
        is_lost = trial.drop and self.number in lost_in(self.step // trial.sync_every, trial)
        self.diloco.report(tokens=LOST if is_lost else KEPT)
        self.run.computing.acquire()
        self.computes = True
        try:
            if self.harms and self.step % trial.sync_every == 0:
                self.start = [each.detach().clone() for each in self.model.parameters()]
            loss = gpt.inner_step(self.model, self.optimizers, *next(self.batches))
        finally:
            if self.computes:
                self._gives()
        self.diloco.report(loss=loss)

    def _stepped(self, *_: Any) -> None:
        self.step += 1
        if self.harms and self.step % self.trial.sync_every == 0:
            self._harm()
        self._gives()

    def _gives(self) -> None:
        self.computes = False
        self.run.computing.release()

    @torch.no_grad()
    def _harm(self) -> None:
        for parameter, start in zip(self.model.parameters(), self.start, strict=True):
            moved = parameter - start
            factor = REVERSED if self.harms == "reversed" else ENORMOUS
            parameter.copy_(start + factor * moved)

    def _looks(self) -> None:
        """The first worker evaluates the received parameters every `trial.every` rounds."""
        every = self.trial.every * self.trial.sync_every
        if self.number == 0 and every and self.step % every == 0:
            seconds = self.step / min(self.trial.speeds, default=1.0)
            self._evaluates(self.step, seconds)

    def _evaluates(self, steps: int, seconds: float) -> None:
        with self.run.computing, self.diloco.global_parameters():
            loss = gpt.validation_loss(self.model, *self.run.text.validation)
        self.run.sees(steps, seconds, loss)


def finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def train_without_broker(trial: Trial, text: Text) -> Outcome:
    """The baseline of DiLoCo: one model on the batches of all its replicas.

    The mean of equally large batches' gradients is the gradient of them together. With one replica it
    is one worker alone, or with an outer optimizer of its own.
    """
    model = model_of(trial)
    optimizers = inner_optimizers(model, trial)
    schedules = [gpt.build_schedule(each, trial.recipe) for each in optimizers]
    diloco = None
    if trial.arm == "local":
        options = WorkerOptions(handle_signals=False, local=trial.broker)
        every = trial.sync_every
        diloco = DiLoCoWorker(model, optimizers, "local", sync_every=every, options=options)
        diloco.start()
    replicas = [
        training_batches(shard, trial.batch, trial.recipe.context, batch_seed(trial.seed, number))
        for number, shard in enumerate(text.shards)
    ]
    outcome = Outcome()
    outcome.curve.append((0, 0.0, gpt.validation_loss(model, *text.validation)))
    every = trial.every * trial.sync_every or trial.steps
    for step in range(1, trial.steps + 1):
        batches = [next(each) for each in replicas]
        tokens, targets = (torch.cat(part) for part in zip(*batches, strict=True))
        gpt.inner_step(model, optimizers, tokens, targets)
        for schedule in schedules:
            schedule.step()
        if step % every == 0 or step == trial.steps:
            with nullcontext() if diloco is None else diloco.global_parameters():
                loss = gpt.validation_loss(model, *text.validation)
            outcome.curve.append((step, float(step), finite(loss)))
            if not math.isfinite(loss):
                break
    if diloco is not None:
        outcome.pushes = diloco.sync_count
        diloco.load_global()
        diloco.close()
    outcome.parameters = dict(model.state_dict())
    return outcome
