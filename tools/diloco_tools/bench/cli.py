"""`diloco-bench`: the limits of this machine and what the product makes of them, part by part."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from diloco_tools.bench import (
    attached,
    billion,
    crowd,
    folding,
    free,
    heartbeat,
    limits,
    machine,
    saving,
    streaming,
    transport,
    wan,
)
from diloco_tools.bench.figures import Figure, Report
from diloco_tools.bench.plot import draw
from diloco_tools.bench.scale import QUICK, SIZES, WHOLE
from diloco_tools.bench.stage import ActorFailed, Stage
from diloco_tools.bench.suite import Part, conclusions, parts_of, rounds_of
from diloco_tools.bench.table import sentences, tables, targets_table
from diloco_tools.processes import ChildFailed
from diloco_tools.terminal import console

app = typer.Typer(
    help="Measure the limits of this machine and what the product makes of them, as ratios.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
QUIET_LOAD = 0.7  # of the last minute; above it the figures are those of a busy machine
WIDTH = 130  # of the tables where there is no terminal
Out = Annotated[Path, typer.Option(help="Folder for JSON, table, picture and logs.")]
Repeats = Annotated[
    int, typer.Option(min=1, help="Measurements of each figure, in turn with its limit.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Under a minute: small models, few repeats.")]
Size = Annotated[str, typer.Option("--parameters", help=f"Model: {', '.join(SIZES)}.")]
DEFAULT_OUT = Path("runs/bench")


@app.command(name="all")
def everything(quick: Quick = False, out: Out = DEFAULT_OUT) -> None:
    """Every part, about a quarter of an hour on two cores (--quick: under one)."""
    scale = QUICK if quick else WHOLE
    run("quick" if quick else "all", parts_of(scale), out, scale.raw_bytes)


@app.command(name="limits")
def only_limits(repeats: Repeats = 5, out: Out = DEFAULT_OUT) -> None:
    """memcpy, raw TCP, the fold, the outer step."""
    run_one(limits.PART, lambda stage: limits.measure(stage, repeats=repeats), out)


@app.command(name="transport")
def only_transport(
    chunk_kib: Annotated[
        str, typer.Option(help="Sizes of chunks in KiB, with commas; at most 4096.")
    ] = str(transport.DEFAULT_CHUNK // 1024),
    window: Annotated[str, typer.Option(help="Chunks under way, with commas.")] = str(
        transport.DEFAULT_WINDOW
    ),
    repeats: Repeats = 5,
    out: Out = DEFAULT_OUT,
) -> None:
    """DEALER and ROUTER with our frames and credits, for each size of chunks and each window."""
    sizes = [1024 * each for each in whole_numbers("--chunk-kib", chunk_kib, 4096)]
    windows = whole_numbers("--window", window, 256)

    def part(stage: Stage) -> list[Figure]:
        return transport.measure(
            stage,
            repeats=repeats,
            total=WHOLE.transport_bytes,
            chunk_sizes=sizes,
            windows=windows,
        )

    run_one(transport.PART, part, out)


@app.command(name="fold")
def only_fold(
    parameters: Size = "125M",
    pushers: Annotated[str, typer.Option(help="Pushes at a time, with commas.")] = "1,2,4",
    repeats: Repeats = 5,
    out: Out = DEFAULT_OUT,
) -> None:
    """A real broker takes pushes in and adds them up."""
    counts = whole_numbers("--pushers", pushers, 64)
    check(parameters)

    def part(stage: Stage) -> list[Figure]:
        return folding.measure(stage, size=parameters, pushers=counts, repeats=repeats)

    run_one(folding.PART, part, out)


@app.command(name="round")
def only_round(
    parameters: Annotated[
        str, typer.Option(help=f"Models, with commas: {', '.join(SIZES)}.")
    ] = "125M",
    workers: Annotated[str, typer.Option(help="Numbers of workers, with commas.")] = "2",
    reply_dtype: Annotated[
        str, typer.Option(help="On the way down, with commas: fp32, bf16, fp16.")
    ] = "fp32",
    repeats: Repeats = 5,
    out: Out = DEFAULT_OUT,
) -> None:
    """Whole synchronous rounds with real workers: time, bytes, phases, CPU, memory."""
    sizes, replies = names(parameters), names(reply_dtype)
    for size in sizes:
        check(size)
    for reply in replies:
        if reply not in ("fp32", "bf16", "fp16"):
            fail(f"--reply-dtype {reply!r} is none; choose from fp32, bf16, fp16", 2)
    counts = whole_numbers("--workers", workers, 64)
    every = [(size, count, reply) for size in sizes for count in counts for reply in replies]
    run("round", rounds_of(every, dict.fromkeys(sizes, repeats)), out)


@app.command(name="async")
def only_async(
    parameters: Size = "10M",
    workers: Annotated[str, typer.Option(help="Numbers of workers, with commas.")] = "2,4",
    seconds: Annotated[float, typer.Option(min=0.1, help="For each number of workers.")] = 5.0,
    repeats: Repeats = 5,
    out: Out = DEFAULT_OUT,
) -> None:
    """Asynchronous pushes a second."""
    counts = whole_numbers("--workers", workers, 64)
    check(parameters)

    def part(stage: Stage) -> list[Figure]:
        return free.measure(
            stage, size=parameters, workers=counts, seconds=seconds, repeats=repeats
        )

    run_one(free.PART, part, out)


@app.command(name="streaming")
def only_streaming(
    steps: Annotated[
        int, typer.Option(min=streaming.SYNC_EVERY, help="Training steps of each measurement.")
    ] = 40,
    repeats: Repeats = 2,
    out: Out = DEFAULT_OUT,
) -> None:
    """Fragments with overlap: how much of the exchange is hidden behind training."""

    def part(stage: Stage) -> list[Figure]:
        return streaming.measure(stage, steps=steps, repeats=repeats)

    run_one(streaming.PART, part, out)


@app.command(name="heartbeat")
def only_heartbeat(
    parameters: Size = "125M",
    workers: Annotated[int, typer.Option(min=1)] = 4,
    rounds_: Annotated[int, typer.Option("--rounds", min=1)] = 3,
    out: Out = DEFAULT_OUT,
) -> None:
    """How soon heartbeats are answered during a round."""
    check(parameters)

    def part(stage: Stage) -> list[Figure]:
        return heartbeat.measure(stage, size=parameters, workers=workers, rounds=rounds_)

    run_one(heartbeat.PART, part, out)


@app.command(name="idle")
def only_idle(
    workers: Annotated[int, typer.Option(min=1, max=4000)] = 500,
    seconds: Annotated[float, typer.Option(min=0.3)] = 9.0,
    out: Out = DEFAULT_OUT,
) -> None:
    """What many workers cost that only send heartbeats."""

    def part(stage: Stage) -> list[Figure]:
        return crowd.measure(stage, workers=workers, seconds=seconds)

    run_one(crowd.PART, part, out)


@app.command(name="checkpoint")
def only_checkpoint(
    parameters: Size = "50M",
    workers: Annotated[int, typer.Option(min=1, help="Of each of the two runs.")] = 2,
    repeats: Repeats = 3,
    out: Out = DEFAULT_OUT,
) -> None:
    """A round while a checkpoint is written, against one without."""
    check(parameters)

    def part(stage: Stage) -> list[Figure]:
        return saving.measure(stage, size=parameters, workers=workers, repeats=repeats)

    run_one(saving.PART, part, out)


@app.command(name="largest")
def only_largest(
    millions: Annotated[int, typer.Option(min=1, help="Parameters, in millions.")] = 1000,
    repeats: Repeats = 2,
    out: Out = DEFAULT_OUT,
) -> None:
    """A round of a billion parameters, pushed from one small buffer; needs 14 GB of memory."""

    def part(stage: Stage) -> list[Figure]:
        return billion.measure(stage, parameters=millions * 1_000_000, rounds=repeats)

    run_one(billion.PART, part, out)


@app.command(name="wan")
def only_wan(parameters: Size = "50M", repeats: Repeats = 3, out: Out = DEFAULT_OUT) -> None:
    """A round through a link of 1 Gb/s with a round trip of 100 ms."""
    check(parameters)

    def part(stage: Stage) -> list[Figure]:
        return wan.measure(stage, size=parameters, repeats=repeats)

    run_one(wan.PART, part, out)


@app.command(name="attached")
def only_attached(
    steps: Annotated[int, typer.Option(min=attached.PARTS)] = 200, out: Out = DEFAULT_OUT
) -> None:
    """A training step with the hook attached against one without."""
    run_one(attached.PART, lambda stage: attached.measure(stage, steps=steps), out)


# Running.


def run_one(name: str, measure: Callable[[Stage], list[Figure]], out: Path) -> None:
    """A single part."""
    run(name.replace(" ", "-").replace(",", ""), [Part(name, measure)], out)


def run(name: str, parts: Sequence[Part], out: Path, raw_bytes: int = WHOLE.raw_bytes) -> None:
    """Measure some parts, print the tables, write the files."""
    if complaint := machine.complaint():
        fail(complaint, 2)
    at = datetime.now().astimezone()
    stem = f"{name}-{at:%Y%m%d-%H%M%S}"
    logs = out.resolve() / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"cannot write to {out} ({error.strerror}); name another folder with --out", 2)
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, leave)
    shown = console()
    if not shown.is_terminal:
        shown = console(width=WIDTH)

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
        with Stage(logs, raw_bytes) as stage:
            for number, part in enumerate(parts, start=1):
                passed = time.monotonic() - began
                say(f"{passed:4.0f} s  {number}/{len(parts)}  {part.name}")
                try:
                    figures += part.measure(stage)
                except (ActorFailed, ChildFailed) as error:
                    # What was measured before, and what comes, is worth as much without it.
                    say(f"diloco-bench: {error}")
                    stage.skipped.append(f"{part.name}: FAILED, see above and {logs}")
                    has_failed = True
                    stage.start_afresh()
            figures += conclusions(stage, figures)
    except KeyboardInterrupt:
        fail("interrupted; every process of the benchmark has been ended", 130)
    seconds = time.monotonic() - began
    command = shlex.join(["diloco-bench", *sys.argv[1:]])
    skipped = tuple(stage.skipped)
    whole = Report(
        command, at.isoformat(timespec="seconds"), seconds, about, tuple(figures), skipped
    )
    write(whole, out.resolve() / stem, shown)
    if has_failed:
        raise typer.Exit(1)


def write(report: Report, stem: Path, shown: Console) -> None:
    """Print the tables; write them, the figures and the picture beside each other."""
    with Path(f"{stem}.txt").open("w", encoding="utf-8") as file:
        for target in (shown, console(file=file, width=WIDTH)):
            target.print()
            for each in (*tables(report), targets_table(report)):
                if each.row_count:
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


# Options.


def names(text: str) -> list[str]:
    """The parts between commas."""
    return [each.strip() for each in text.split(",") if each.strip()]


def whole_numbers(option: str, text: str, most: int) -> list[int]:
    """The numbers between commas, from 1 to `most`."""
    found = names(text)
    if not found or not all(each.isdecimal() and 1 <= int(each) <= most for each in found):
        fail(f"{option} {text!r} should be numbers from 1 to {most}, with commas between them", 2)
    return [int(each) for each in found]


def check(size: str) -> None:
    """End with a sentence where there is no model of this size."""
    if size not in SIZES:
        fail(
            f"--parameters {size!r} is no model of the benchmark; choose from {', '.join(SIZES)}", 2
        )


def leave(number: int, _frame: FrameType | None) -> NoReturn:
    """On SIGTERM and SIGHUP: end like any other error does, so that all processes are ended too."""
    raise SystemExit(128 + number)


def fail(sentence: str, code: int) -> NoReturn:
    typer.echo(f"diloco-bench: {sentence}", err=True)
    raise typer.Exit(code)
