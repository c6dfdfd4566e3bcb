"""One demo from start to end: a broker and its workers, then two single workers, then the curves.

The single workers are the baselines and train at the same time: one for the steps of a DiLoCo worker,
one on as many tokens as all DiLoCo workers together. An observer pulls the global model while the
DiLoCo workers train. It is evaluated after the shorter baseline, when a core is free, so as not to
slow the training.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from diloco_protocol.errors import DilocoError
from diloco_tools.demo.data import load_text
from diloco_tools.demo.display import Display
from diloco_tools.demo.model import GPTConfig, build_model, validation_loss
from diloco_tools.demo.results import Record, summary
from diloco_tools.demo.settings import Settings
from diloco_tools.processes import Children, JsonLines, wait_for_line
from diloco_tools.terminal import installed
from diloco_worker import DiLoCoClient

EVALUATIONS = 12  # points of each curve, about
BROKER_START = 120.0  # seconds: a cold disk reads torch slowly
PULL_TIMEOUT = 20.0  # seconds that the observer waits for the broker
TURN = 0.2  # seconds between two polls of the children
SAME_STEPS, SAME_TOKENS = "same-steps", "same-tokens"  # names of the baselines

OF_BROKER = ("workers", "sync_every", "outer_lr", "outer_momentum", "wire_dtype", "reply_dtype")
OF_TRAINING = ("steps", "batch", "context", "schedule", "seed", "data")


def options(settings: Settings, names: Iterable[str]) -> list[str]:
    """These settings as options of a command, without those that are None."""
    given = ((f"--{name.replace('_', '-')}", getattr(settings, name)) for name in names)
    return [word for option, value in given if value is not None for word in (option, str(value))]


def broker_command(settings: Settings) -> list[str]:
    """`diloco-broker serve` on two free ports of this machine."""
    return [
        *(sys.executable, "-m", "diloco_broker", "serve", "--no-save"),
        *options(settings, OF_BROKER),
        *("--bind", "tcp://127.0.0.1:*", "--feed", "tcp://127.0.0.1:*"),
    ]


def worker_options(settings: Settings, server: str, shard: int) -> list[str]:
    """Options of the training script for a DiLoCo worker on its own shard of the text."""
    return [
        *("--lr", str(settings.lr), "--server", server, "--worker-id", f"worker-{shard}"),
        *("--shard", str(shard), "--shards", str(settings.workers)),
    ]


def single_options(settings: Settings) -> list[str]:
    """Options of the same script without a server, on the text of all workers."""
    every = max(1, settings.steps // EVALUATIONS)
    return ["--lr", str(settings.single_lr), "--eval-every", str(every)]


def same_tokens_options(settings: Settings) -> list[str]:
    """Options for a single worker on as many tokens as all DiLoCo workers, in the same number of steps.

    Its batch is that of all workers together, so it computes the same as data-parallel training.
    """
    return [*single_options(settings), "--batch", str(settings.workers * settings.batch)]


def rounds_to_pull(rounds: int) -> list[int]:
    """Rounds after which the global model is pulled: evenly spaced, including the last.

    >>> rounds_to_pull(30)
    [2, 5, 7, 10, 12, 15, 17, 20, 22, 25, 27, 30]
    """
    looks = min(EVALUATIONS, rounds)
    return [rounds * (look + 1) // looks for look in range(looks)]


class Trainee:
    """A training process, started at once, and the records it has written so far."""

    def __init__(self, children: Children, settings: Settings, name: str, own: list[str]) -> None:
        log = children.folder / f"{name}.jsonl"
        log.unlink(missing_ok=True)  # of an earlier run
        script = [sys.executable, "-m", "diloco_tools.demo.train", "--log", str(log)]
        self.child = children.start(name, [*script, *options(settings, OF_TRAINING), *own])
        self.step = 0
        self.loss = float("nan")
        self.curve: list[Record] = []
        self.done: Record | None = None
        self._steps = settings.steps
        self._lines = JsonLines(log)

    @property
    def is_busy(self) -> bool:
        return self.done is None or self.child.running

    def look(self, merged: TextIO) -> None:
        """Read its new records and copy them to `merged`; ChildFailed if it ended too early."""
        running = self.child.running  # before reading, so that the last record is not missed
        for record in self._lines.new():
            merged.write(json.dumps({"who": self.child.name, **record}) + "\n")
            self.step = record["step"]
            if record.get("done"):
                self.done = record
                continue
            self.loss = record["loss"]
            if "val_loss" in record:
                self.curve.append({name: record[name] for name in ("step", "val_loss")})
        if not running and (self.done is None or self.child.process.returncode != 0):
            raise self.child.failure()

    def show(self, display: Display, figures: str) -> None:
        text = f"loss {self.loss:.3f}{figures}" if self.step else "starting"
        display.show(self.child.name, self.step, self._steps, text)

    def result(self) -> Record:
        """Its last record; ChildFailed if it did too few steps."""
        assert self.done is not None
        if self.step != self._steps:
            raise self.child.failure(f"stopped after {self.step} of {self._steps} steps")
        return self.done


def run(settings: Settings, out: Path, display: Display) -> dict[str, Any]:
    """The whole experiment, and its summary; logs go to `out`. Raises DataError and ChildFailed."""
    path = None if settings.data is None else Path(settings.data)
    validation = load_text(path, settings.workers, settings.context).validation
    model = build_model(settings.seed, GPTConfig(context=settings.context))

    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    display.say(
        f"a GPT of {parameters:,} parameters, {settings.workers} workers, {settings.steps} steps "
        f"each, a round every {settings.sync_every} steps"
    )

    with (
        Children(out) as children,
        (out / "log.jsonl").open("w", encoding="utf-8", buffering=1) as merged,
    ):
        workers, pulled = train_diloco(settings, children, merged, display)
        display.say(
            "the same script without a broker: one worker for the same steps, and one on the same tokens"
        )
        single = Trainee(children, settings, SAME_STEPS, single_options(settings))
        same_tokens = Trainee(children, settings, SAME_TOKENS, same_tokens_options(settings))
        baselines = (single, same_tokens)
        curve: list[Record] = []
        while any(each.is_busy for each in baselines) or len(curve) < len(pulled):
            for baseline in baselines:
                baseline.look(merged)
            if len(curve) < len(pulled) and not single.is_busy:
                number, tensors = pulled[len(curve)]
                model.load_state_dict(tensors)
                step, loss = number * settings.sync_every, validation_loss(model, *validation)
                point: Record = {"step": step, "val_loss": loss}
                curve.append(point)
                record = {"who": "global", "round": number, **point}
                merged.write(json.dumps(record) + "\n")
            else:
                time.sleep(TURN)
            for baseline in baselines:
                seen = [f"  validation {point['val_loss']:.3f}" for point in baseline.curve]
                baseline.show(display, seen[-1] if seen else "")
            if curve:
                figures = f"validation {curve[-1]['val_loss']:.3f}"
                display.show("global model", len(curve), len(pulled), figures)
        return summary(
            settings,
            parameters,
            workers=[worker.result() for worker in workers],
            diloco_curve=curve,
            single=single.result(),
            single_curve=single.curve,
            same_tokens=same_tokens.result(),
            same_tokens_curve=same_tokens.curve,
        )


def train_diloco(
    settings: Settings, children: Children, merged: TextIO, display: Display
) -> tuple[list[Trainee], list[tuple[int, dict[str, Tensor]]]]:
    """Run broker and workers to the end; returns the workers, and the global model after some rounds."""
    broker = children.start("broker", broker_command(settings))
    server = wait_for_line(broker, "control", BROKER_START)
    feed = wait_for_line(broker, "feed", BROKER_START)
    display.say(f"broker at {server}, watch it in another terminal:")
    display.say(f"  {installed('diloco-top')} {feed}")
    workers = [
        Trainee(children, settings, f"worker-{shard}", worker_options(settings, server, shard))
        for shard in range(settings.workers)
    ]
    due = rounds_to_pull(settings.rounds)
    pulled: list[tuple[int, dict[str, Tensor]]] = []
    with DiLoCoClient(server, timeout=PULL_TIMEOUT) as observer:
        training = True
        while training:
            if not broker.running:
                raise broker.failure()
            for worker in workers:
                worker.look(merged)
                worker.show(
                    display, f"  round {worker.step // settings.sync_every}/{settings.rounds}"
                )
            training = any(worker.is_busy for worker in workers)
            finished = min(worker.step for worker in workers) // settings.sync_every
            if due and (finished >= due[0] or not training):
                try:
                    now = observer.pull()
                except DilocoError as error:
                    if broker.running:
                        raise
                    raise broker.failure() from error  # with the end of its log
                pulled.append((now.version.counter, now.tensors))
                due = [number for number in due if number > now.version.counter]
            time.sleep(TURN)
    for worker in workers:
        worker.result()
    if pulled[-1][0] != settings.rounds:
        raise broker.failure(f"finished round {pulled[-1][0]} instead of {settings.rounds}")
    broker.end()
    return workers, pulled
