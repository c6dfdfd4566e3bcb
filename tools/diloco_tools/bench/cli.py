"""`diloco-bench`: the limits of this machine and what the product makes of them, part by part."""

from __future__ import annotations

import inspect
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from diloco_tools import terminal
from diloco_tools.bench import machine
from diloco_tools.bench.options import COMMAND, refuse
from diloco_tools.bench.parts import load, rounds, training, wire
from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.report.figures import (
    TRANSPORT,
    TRANSPORT_WITH_FOLD,
    Figure,
    Parts,
    Report,
    figure,
)
from diloco_tools.bench.report.plot import draw
from diloco_tools.bench.report.table import sentences, tables
from diloco_tools.processes import ChildFailed, end_like_an_error_on_signals

app = typer.Typer(
    help="Measure the limits of this machine and what the product makes of them, as ratios.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
RAW_BYTES, QUICK_RAW_BYTES = 512 << 20, 128 << 20  # that a measurement of raw TCP moves
QUIET_LOAD = 0.7  # of the last minute; above it the figures are those of a busy machine
WIDTH = 130  # of the tables where there is no terminal
Out = Annotated[Path, typer.Option(help="Folder for JSON, table, picture and logs.")]
Quick = Annotated[bool, typer.Option("--quick", help="Under a minute: small models, few repeats.")]
DEFAULT_OUT = Path("runs/bench")


@dataclass(frozen=True)
class Command:
    """Its options are the keywords of what measures, its help is the first sentence there."""

    name: str  # of the part that is measured, and of the files
    measure: Callable[..., Any]
    whole: Sequence[Mapping[str, Any]] = (
        {},
    )  # its options in `all`, for each time that it is there
    quick: Sequence[Mapping[str, Any]] = ({},)  # the same in `all --quick`

    def parts(self, **options: Any) -> Parts:
        """What is measured with these options, by name; a part for each configuration of a round."""
        if self.measure is rounds.configurations:
            return rounds.configurations(**options)
        return {self.name: partial(self.measure, **options)}


EVERY_ROUND = {"workers": "2,4,8", "replies": "fp32,bf16"}
COMMANDS = {
    "limits": Command(wire.LIMITS, wire.limits, quick=[{"repeats": 3}]),
    "transport": Command(TRANSPORT, wire.transport, quick=[{"repeats": 3}]),
    "fold": Command(
        TRANSPORT_WITH_FOLD, wire.fold, quick=[{"size": "10M", "pushers": "1", "repeats": 3}]
    ),
    "round": Command(
        "round",
        rounds.configurations,
        whole=[
            {**EVERY_ROUND, "sizes": "10M,50M"},
            {**EVERY_ROUND, "sizes": "125M", "repeats": 3},
        ],
        quick=[{"sizes": "10M", "repeats": 3}],
    ),
    "async": Command(
        training.ASYNCHRONOUS,
        training.asynchronous,
        quick=[{"workers": "2", "seconds": 1.0, "repeats": 3}],
    ),
    "streaming": Command(
        training.STREAMING, training.streaming, quick=[{"steps": 10, "repeats": 1}]
    ),
    "heartbeat": Command(load.HEARTBEAT, load.heartbeat, quick=[{"size": "10M", "workers": 2}]),
    "checkpoint": Command(
        rounds.CHECKPOINT,
        rounds.checkpoint,
        whole=[{"repeats": 5}],
        quick=[{"size": "10M", "workers": 1}],
    ),
    "wan": Command(wire.WAN, wire.wan, whole=[{"repeats": 5}], quick=[{"size": "10M"}]),
    "attached": Command(
        training.ATTACHED, training.attached, whole=[{"steps": 150}], quick=[{"steps": 20}]
    ),
    "idle": Command(load.IDLE, load.idle, quick=[{"workers": 100, "seconds": 2.0}]),
    # Last, when the trainers have given their memory back. Not in the quick one.
    "largest": Command(load.LARGEST, load.largest, quick=[]),
}


def all_parts(*, quick: bool = False) -> Parts:
    """Everything, or the same with small models and few repeats and without the largest."""
    found: Parts = {}
    for command in COMMANDS.values():
        for options in command.quick if quick else command.whole:
            found |= command.parts(**options)
    return found


@app.command(name="all")
def everything(quick: Quick = False, out: Out = DEFAULT_OUT) -> None:
    """Every part, about a quarter of an hour on two cores (--quick: under one)."""
    if quick:
        run("quick", all_parts(quick=True), out, QUICK_RAW_BYTES)
    else:
        run("all", all_parts(), out)


def add_command(name: str, command: Command) -> None:
    """Its options on the command line are those that it declares, and where the results go."""

    def act(*, out: Path, **options: Any) -> None:
        stem = command.name.replace(" ", "-").replace(",", "")
        run(stem, command.parts(**options), out)

    declared = inspect.signature(command.measure, eval_str=True).parameters.values()
    options = [each for each in declared if each.name != "pool"]
    where = inspect.Parameter(
        "out", inspect.Parameter.KEYWORD_ONLY, default=DEFAULT_OUT, annotation=Out
    )
    act.__signature__ = inspect.Signature([*options, where])  # type: ignore[attr-defined]
    first_sentence = (inspect.getdoc(command.measure) or "").partition("\n\n")[0]
    app.command(name=name, help=first_sentence)(act)


for command_name, declared_command in COMMANDS.items():
    add_command(command_name, declared_command)


def run(name: str, parts: Parts, out: Path, raw_bytes: int = RAW_BYTES) -> None:
    """Measure some parts, print the tables, write the files."""
    if complaint := machine.complaint():
        refuse(complaint)
    at = datetime.now().astimezone()
    stem = f"{name}-{at:%Y%m%d-%H%M%S}"
    logs = out.resolve() / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"cannot write to {out} ({error.strerror}); name another folder with --out")
    machine.allow_many_files()
    end_like_an_error_on_signals()
    shown = terminal.console_for_tables(WIDTH)

    def say(text: str) -> None:
        shown.print(text, soft_wrap=True)

    began = time.monotonic()
    figures: list[Figure] = []
    has_failed = False
    about = machine.describe()
    say(", ".join(f"{key} {value}" for key, value in about.items()))
    if about["load"] > QUIET_LOAD:
        say("Other processes are at work here: ratios will be rough, times and tails too long.")
    try:
        with ProcessPool(logs, raw_bytes) as pool:
            for number, (part, measure) in enumerate(parts.items(), start=1):
                passed = time.monotonic() - began
                say(f"{passed:4.0f} s  {number}/{len(parts)}  {part}")
                try:
                    figures += measure(pool)
                except ChildFailed as error:
                    # What was measured before, and what comes, is worth as much without it.
                    say(f"diloco-bench: {error}")
                    pool.skipped.append(f"{part}: FAILED, see above and {logs}")
                    has_failed = True
                    pool.start_afresh()
            figures += conclusions(pool, figures)
    except KeyboardInterrupt:
        terminal.fail(COMMAND, "interrupted; every process of the benchmark has been ended", 130)
    seconds = time.monotonic() - began
    command = shlex.join(["diloco-bench", *sys.argv[1:]])
    skipped = tuple(pool.skipped)
    whole = Report(
        command, at.isoformat(timespec="seconds"), seconds, about, tuple(figures), skipped
    )
    write(whole, out.resolve() / stem, shown)
    if has_failed:
        raise typer.Exit(1)


def conclusions(pool: ProcessPool, figures: Sequence[Figure]) -> list[Figure]:
    """What follows from several parts: how memory grows, and the limit over the whole run."""
    found = rounds.growth(figures)
    samples = pool.raw_samples
    if samples:
        of_all = partial(figure, wire.LIMITS, "raw TCP, over the whole run")
        found.append(of_all("speed", [s.speed for s in samples], "GB/s"))
        found.append(of_all("send", [s.send_cpu for s in samples], "s/GB"))
        found.append(of_all("receive", [s.receive_cpu for s in samples], "s/GB"))
    return found


def write(report: Report, stem: Path, shown: Console) -> None:
    """Print the tables; write them, the figures and the picture beside each other."""
    with Path(f"{stem}.txt").open("w", encoding="utf-8") as file:
        for target in (shown, terminal.console(file=file, width=WIDTH)):
            target.print()
            for each in tables(report):
                target.print(each)
            for sentence in sentences(report):
                target.print(sentence, soft_wrap=True)
    Path(f"{stem}.json").write_text(json.dumps(report.plain(), indent=2) + "\n")
    written = f"{stem.name}.json, .txt"
    try:
        written += ", .png" if draw(report, Path(f"{stem}.png")) else ""
    except ImportError:
        missing = "no picture: matplotlib is missing (pip install 'diloco-broker[plot]')"
        shown.print(missing, soft_wrap=True)
    shown.print(f"{report.seconds:.0f} s; {written} are in {stem.parent}", soft_wrap=True)
