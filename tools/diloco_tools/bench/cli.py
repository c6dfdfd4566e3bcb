"""`diloco-bench`: the limits of this machine and what the product makes of them, part by part."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from diloco_tools import terminal
from diloco_tools.bench import machine
from diloco_tools.bench.parts import (
    asynchronous,
    attached,
    checkpoint,
    fold,
    heartbeat,
    idle,
    largest,
    limits,
    streaming,
    transport,
    wan,
)
from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.report.figures import Figure, Report
from diloco_tools.bench.report.plot import draw
from diloco_tools.bench.report.table import sentences, tables, targets_table
from diloco_tools.bench.sizes import SIZES
from diloco_tools.bench.suite import (
    QUICK_RAW_BYTES,
    RAW_BYTES,
    Part,
    conclusions,
    part,
    quick_parts,
    round_parts,
    whole_parts,
)
from diloco_tools.processes import ChildFailed, end_like_an_error_on_signals

COMMAND = "diloco-bench"
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
    if quick:
        run("quick", quick_parts(), out, QUICK_RAW_BYTES)
    else:
        run("all", whole_parts(), out)


@app.command(name="limits")
def only_limits(repeats: Repeats = 5, out: Out = DEFAULT_OUT) -> None:
    """memcpy, raw TCP, the fold, the outer step."""
    run_one(part(limits.PART, limits.measure, repeats=repeats), out)


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
    run_one(
        part(
            transport.PART,
            transport.measure,
            repeats=repeats,
            total=RAW_BYTES,
            chunk_sizes=sizes,
            windows=windows,
        ),
        out,
    )


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
    run_one(part(fold.PART, fold.measure, size=parameters, pushers=counts, repeats=repeats), out)


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
            refuse(f"--reply-dtype {reply!r} is none; choose from fp32, bf16, fp16")
    counts = whole_numbers("--workers", workers, 64)
    every = [(size, count, reply) for size in sizes for count in counts for reply in replies]
    run("round", round_parts(every, dict.fromkeys(sizes, repeats)), out)


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
    run_one(
        part(
            asynchronous.PART,
            asynchronous.measure,
            size=parameters,
            workers=counts,
            seconds=seconds,
            repeats=repeats,
        ),
        out,
    )


@app.command(name="streaming")
def only_streaming(
    steps: Annotated[
        int, typer.Option(min=streaming.SYNC_EVERY, help="Training steps of each measurement.")
    ] = 40,
    repeats: Repeats = 2,
    out: Out = DEFAULT_OUT,
) -> None:
    """Fragments with overlap: how much of the exchange is hidden behind training."""
    run_one(part(streaming.PART, streaming.measure, steps=steps, repeats=repeats), out)


@app.command(name="heartbeat")
def only_heartbeat(
    parameters: Size = "125M",
    workers: Annotated[int, typer.Option(min=1)] = 4,
    rounds_: Annotated[int, typer.Option("--rounds", min=1)] = 3,
    out: Out = DEFAULT_OUT,
) -> None:
    """How soon heartbeats are answered during a round."""
    check(parameters)
    run_one(
        part(heartbeat.PART, heartbeat.measure, size=parameters, workers=workers, rounds=rounds_),
        out,
    )


@app.command(name="idle")
def only_idle(
    workers: Annotated[int, typer.Option(min=1, max=4000)] = 500,
    seconds: Annotated[float, typer.Option(min=0.3)] = 9.0,
    out: Out = DEFAULT_OUT,
) -> None:
    """What many workers cost that only send heartbeats."""
    run_one(part(idle.PART, idle.measure, workers=workers, seconds=seconds), out)


@app.command(name="checkpoint")
def only_checkpoint(
    parameters: Size = "50M",
    workers: Annotated[int, typer.Option(min=1, help="Of each of the two runs.")] = 2,
    repeats: Repeats = 3,
    out: Out = DEFAULT_OUT,
) -> None:
    """A round while a checkpoint is written, against one without."""
    check(parameters)
    run_one(
        part(
            checkpoint.PART, checkpoint.measure, size=parameters, workers=workers, repeats=repeats
        ),
        out,
    )


@app.command(name="largest")
def only_largest(
    millions: Annotated[int, typer.Option(min=1, help="Parameters, in millions.")] = 1000,
    repeats: Repeats = 2,
    out: Out = DEFAULT_OUT,
) -> None:
    """A round of a billion parameters, pushed from one small buffer; needs 14 GB of memory."""
    run_one(
        part(largest.PART, largest.measure, parameters=millions * 1_000_000, repeats=repeats), out
    )


@app.command(name="wan")
def only_wan(parameters: Size = "50M", repeats: Repeats = 3, out: Out = DEFAULT_OUT) -> None:
    """A round through a link of 1 Gb/s with a round trip of 100 ms."""
    check(parameters)
    run_one(part(wan.PART, wan.measure, size=parameters, repeats=repeats), out)


@app.command(name="attached")
def only_attached(
    steps: Annotated[int, typer.Option(min=attached.PARTS)] = 200, out: Out = DEFAULT_OUT
) -> None:
    """A training step with the hook attached against one without."""
    run_one(part(attached.PART, attached.measure, steps=steps), out)


# Running.


def run_one(single: Part, out: Path) -> None:
    """A single part."""
    run(single.name.replace(" ", "-").replace(",", ""), [single], out)


def run(name: str, parts: Sequence[Part], out: Path, raw_bytes: int = RAW_BYTES) -> None:
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
            for number, part in enumerate(parts, start=1):
                passed = time.monotonic() - began
                say(f"{passed:4.0f} s  {number}/{len(parts)}  {part.name}")
                try:
                    figures += part.measure(pool)
                except ChildFailed as error:
                    # What was measured before, and what comes, is worth as much without it.
                    say(f"diloco-bench: {error}")
                    pool.skipped.append(f"{part.name}: FAILED, see above and {logs}")
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


def write(report: Report, stem: Path, shown: Console) -> None:
    """Print the tables; write them, the figures and the picture beside each other."""
    with Path(f"{stem}.txt").open("w", encoding="utf-8") as file:
        for target in (shown, terminal.console(file=file, width=WIDTH)):
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
        refuse(f"{option} {text!r} should be numbers from 1 to {most}, with commas between them")
    return [int(each) for each in found]


def check(size: str) -> None:
    """End with a sentence where there is no model of this size."""
    if size not in SIZES:
        known = ", ".join(SIZES)
        refuse(f"--parameters {size!r} is no model of the benchmark; choose from {known}")


def refuse(sentence: str) -> NoReturn:
    """End with a sentence and exit code 2."""
    terminal.fail(COMMAND, sentence, 2)
