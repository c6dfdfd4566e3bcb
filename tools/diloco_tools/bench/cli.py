"""`diloco-bench`: the limits of this machine and what the product makes of them, part by part."""

from __future__ import annotations

import inspect
import json
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from diloco_tools import terminal
from diloco_tools.bench import machine
from diloco_tools.bench.options import COMMAND, refuse
from diloco_tools.bench.process_pool import ProcessPool
from diloco_tools.bench.report.figures import Figure, Report
from diloco_tools.bench.report.plot import draw
from diloco_tools.bench.report.table import sentences, tables, targets_table
from diloco_tools.bench.suite import (
    COMMANDS,
    QUICK_RAW_BYTES,
    RAW_BYTES,
    Command,
    Part,
    all_parts,
    conclusions,
)
from diloco_tools.processes import ChildFailed, end_like_an_error_on_signals

app = typer.Typer(
    help="Measure the limits of this machine and what the product makes of them, as ratios.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
QUIET_LOAD = 0.7  # of the last minute; above it the figures are those of a busy machine
WIDTH = 130  # of the tables where there is no terminal
Out = Annotated[Path, typer.Option(help="Folder for JSON, table, picture and logs.")]
Quick = Annotated[bool, typer.Option("--quick", help="Under a minute: small models, few repeats.")]
DEFAULT_OUT = Path("runs/bench")


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
        run(command.name, command.parts(**options), out)

    declared = inspect.signature(command.described_by, eval_str=True).parameters.values()
    options = [as_option(each) for each in declared if each.name != "pool"]
    where = inspect.Parameter(
        "out", inspect.Parameter.KEYWORD_ONLY, default=DEFAULT_OUT, annotation=Out
    )
    act.__signature__ = inspect.Signature([*options, where])  # type: ignore[attr-defined]
    first_sentence = (inspect.getdoc(command.described_by) or "").partition("\n\n")[0]
    app.command(name=name, help=first_sentence)(act)


def as_option(parameter: inspect.Parameter) -> inspect.Parameter:
    """The same; several values are text with commas on the command line."""
    if not isinstance(parameter.default, tuple):
        return parameter
    (option,) = parameter.annotation.__metadata__
    text = ",".join(str(each) for each in parameter.default)
    return parameter.replace(annotation=Annotated[str, option], default=text)


for command_name, declared_command in COMMANDS.items():
    add_command(command_name, declared_command)


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
