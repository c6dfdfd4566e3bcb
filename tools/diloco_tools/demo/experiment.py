"""One demo from start to end: a broker and its workers, then the single worker, then both curves.

The global model is pulled by an observer while the workers train; what was pulled is judged while the
single worker trains, when a core is free, so that looking does not slow what is looked at.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from diloco_protocol.errors import DilocoError
from diloco_tools.demo.data import VALIDATION_WINDOWS, load_shard, validation_windows
from diloco_tools.demo.display import Display
from diloco_tools.demo.model import GPTConfig, build_model, validation_loss
from diloco_tools.demo.results import Point, Results, Settings, WorkerResult
from diloco_tools.processes import Child, Children, JsonLines, wait_for_line
from diloco_worker import DiLoCoClient, GlobalParameters

EVALUATIONS = 12  # points of each curve, about
BROKER_START = 120.0  # seconds: a cold disk reads torch slowly
PULL_TIMEOUT = 20.0  # seconds that the observer waits for the broker
TURN = 0.2  # seconds between two looks at the children


OF_BROKER = ("workers", "sync_every", "outer_lr", "outer_momentum", "wire_dtype", "reply_dtype")
OF_TRAINING = ("steps", "batch", "context", "schedule", "seed", "data")


def options(settings: Settings, names: Iterable[str]) -> list[str]:
    """These settings as options of a command; those that are None are left out."""
    given = ((f"--{name.replace('_', '-')}", getattr(settings, name)) for name in names)
    return [word for option, value in given if value is not None for word in (option, str(value))]


def broker_command(settings: Settings) -> list[str]:
    """`diloco-broker serve` on two free ports of this machine."""
    return [
        *(sys.executable, "-m", "diloco_broker", "serve", "--no-save"),
        *options(settings, OF_BROKER),
        *("--bind", "tcp://127.0.0.1:*", "--feed", "tcp://127.0.0.1:*"),
    ]


def training_command(settings: Settings, log: Path) -> list[str]:
    """The training script with what every worker, and the single one, has in common."""
    script = (sys.executable, "-m", "diloco_tools.demo.train")
    return [*script, "--log", str(log), *options(settings, OF_TRAINING)]


def worker_command(settings: Settings, log: Path, server: str, shard: int) -> list[str]:
    """A DiLoCo worker on its own shard of the text."""
    return [
        *training_command(settings, log),
        *("--lr", str(settings.lr), "--server", server, "--worker-id", worker_name(shard)),
        *("--shard", str(shard), "--shards", str(settings.workers)),
    ]


def single_command(settings: Settings, log: Path) -> list[str]:
    """The same script without a server, on all of the text that the workers share."""
    every = max(1, settings.steps // EVALUATIONS)
    single = ("--lr", str(settings.single_lr), "--eval-every", str(every))
    return [*training_command(settings, log), *single]


def worker_name(shard: int) -> str:
    return f"worker-{shard}"


def rounds_to_pull(rounds: int) -> list[int]:
    """Rounds after which the global model is looked at: evenly spread, the last one included.

    >>> rounds_to_pull(30)
    [2, 5, 7, 10, 12, 15, 17, 20, 22, 25, 27, 30]
    """
    looks = min(EVALUATIONS, rounds)
    return [rounds * (look + 1) // looks for look in range(looks)]


class Trainee:
    """A training process and what it has written so far."""

    def __init__(self, child: Child, log: Path) -> None:
        self.child = child
        self.step = 0
        self.loss = float("nan")
        self.curve: list[Point] = []
        self.done: dict[str, Any] | None = None
        self._lines = JsonLines(log)

    @classmethod
    def start(cls, children: Children, name: str, command: list[str], log: Path) -> Trainee:
        """Start the process; a log that an earlier run left behind would be read as its own."""
        log.unlink(missing_ok=True)
        return cls(children.start(name, command), log)

    def look(self, merged: TextIO) -> None:
        """Take in its new records, copy them to `merged`; ChildFailed if it ended too early."""
        running = self.child.running  # asked before reading, so that the last record is not missed
        for record in self._lines.new():
            merged.write(json.dumps({"who": self.child.name, **record}) + "\n")
            self.step = record["step"]
            if record.get("done"):
                self.done = record
                continue
            self.loss = record["loss"]
            if "val_loss" in record:
                self.curve.append(Point(record["step"], record["val_loss"]))
        if not running and (self.done is None or self.child.process.returncode != 0):
            raise self.child.failure()

    def result(self, steps: int) -> Mapping[str, Any]:
        """Its last record; ChildFailed if it did fewer than `steps` steps."""
        assert self.done is not None
        if self.step != steps:
            raise self.child.failure(f"stopped after {self.step} of {steps} steps")
        return self.done


def run(settings: Settings, out: Path, display: Display) -> Results:
    """The whole experiment; logs go to the folder `out`. Raises DataError and ChildFailed."""
    path = None if settings.data is None else Path(settings.data)
    _, held_out = load_shard(path, settings.workers - 1, settings.workers, settings.context)
    validation = validation_windows(held_out, VALIDATION_WINDOWS, settings.context)
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
        workers, pulled = train_diloco(settings, out, children, merged, display)
        display.say("the same script without a broker: the single worker")
        log = out / "single.jsonl"
        single = Trainee.start(children, "single", single_command(settings, log), log)
        points = len(pulled)
        curve: list[Point] = []
        while single.done is None or single.child.running or pulled:
            single.look(merged)
            if pulled:
                number, tensors = pulled.pop(0)
                model.load_state_dict(tensors)
                curve.append(
                    Point(number * settings.sync_every, validation_loss(model, *validation))
                )
                record = {"who": "global", "round": number, "step": curve[-1].step}
                merged.write(json.dumps(record | {"val_loss": curve[-1].val_loss}) + "\n")
            else:
                time.sleep(TURN)
            show_single(settings, single, curve, points, display)
        single_seconds = float(single.result(settings.steps)["seconds"])

    return Results(
        settings=settings,
        parameters=parameters,
        rounds=curve[-1].step // settings.sync_every,
        workers=tuple(
            WorkerResult.from_record(worker.child.name, worker.result(settings.steps))
            for worker in workers
        ),
        diloco_curve=tuple(curve),
        single_curve=tuple(single.curve),
        single_seconds=single_seconds,
    )


def train_diloco(
    settings: Settings, out: Path, children: Children, merged: TextIO, display: Display
) -> tuple[list[Trainee], list[tuple[int, dict[str, Tensor]]]]:
    """Broker and workers from start to end: the workers, and the global model after some rounds."""
    broker = children.start("broker", broker_command(settings))
    server = wait_for_line(broker, "control", BROKER_START)
    feed = wait_for_line(broker, "feed", BROKER_START)
    display.say(f"broker at {server} (watch it from elsewhere: diloco-top {feed})")
    workers = []
    for shard in range(settings.workers):
        log = out / f"{worker_name(shard)}.jsonl"
        command = worker_command(settings, log, server, shard)
        workers.append(Trainee.start(children, worker_name(shard), command, log))

    due = rounds_to_pull(settings.rounds)
    pulled: list[tuple[int, dict[str, Tensor]]] = []
    with DiLoCoClient(server, timeout=PULL_TIMEOUT) as observer:
        training = True
        while training:
            if not broker.running:
                raise broker.failure()
            for worker in workers:
                worker.look(merged)
                figures = f"loss {worker.loss:.3f}  round {worker.step // settings.sync_every}"
                display.show(
                    worker.child.name,
                    worker.step,
                    settings.steps,
                    f"{figures}/{settings.rounds}" if worker.step else "starting",
                )
            training = any(worker.done is None or worker.child.running for worker in workers)
            finished = min(worker.step for worker in workers) // settings.sync_every
            if due and (finished >= due[0] or not training):
                now = pull(observer, broker)
                pulled.append((now.version.counter, now.tensors))
                due = [number for number in due if number > now.version.counter]
            time.sleep(TURN)
    for worker in workers:
        worker.result(settings.steps)
    if pulled[-1][0] != settings.rounds:
        raise broker.failure(f"finished round {pulled[-1][0]} instead of {settings.rounds}")
    broker.end()
    return workers, pulled


def pull(observer: DiLoCoClient, broker: Child) -> GlobalParameters:
    """The newest global parameters; if the broker has died, the error says so and shows its log."""
    try:
        return observer.pull()
    except DilocoError as error:
        if broker.running:
            raise
        raise broker.failure() from error


def show_single(
    settings: Settings, single: Trainee, curve: list[Point], points: int, display: Display
) -> None:
    """The single worker, and how many of the pulled global models have been judged."""
    figures = f"loss {single.loss:.3f}" if single.step else "starting"
    if single.curve:
        figures += f"  validation {single.curve[-1].val_loss:.3f}"
    display.show("single", single.step, settings.steps, figures)
    if curve:
        display.show("global model", len(curve), points, f"validation {curve[-1].val_loss:.3f}")
