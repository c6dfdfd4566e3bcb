"""`python -m diloco_lab.bench`: this machine's limits and the product against them, part by part."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from diloco_lab.bench.parts import codecs, load, round_limit, rounds, tensor_threads, training, wire
from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.bench.report.figures import (
    Parts,
    Report,
    sentences,
    tables,
)
from diloco_lab.driver import machine
from diloco_lab.driver.experiment import Experiment
from diloco_protocol.clients.command_line import with_version
from diloco_tools.terminal import console

COMMAND = "python -m diloco_lab.bench"
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
RAW_BYTES, QUICK_RAW_BYTES = 512 << 20, 128 << 20  # that a measurement of raw TCP moves
QUIET_LOAD = 0.7  # of the last minute; above it the figures are those of a busy machine
WIDTH = 130  # of the tables where there is no terminal
Out = Annotated[Path, typer.Option(help="Folder for JSON, table and logs.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="A minute and a half: small models, few repeats.")
]
DEFAULT_OUT = Path("runs/bench")


# By command: the part that it measures, which names its files, and what measures.
COMMANDS: dict[str, tuple[str, Callable[..., Any]]] = {
    "limits": (wire.LIMITS, wire.limits),
    "transport": (wire.TRANSPORT, wire.transport),
    "fold": (wire.TRANSPORT_WITH_FOLD, wire.fold),
    "round": ("round", rounds.configurations),
    "round-limit": (round_limit.ROUND_LIMIT, round_limit.round_limit),
    "tensor-threads": (tensor_threads.TENSOR_THREADS, tensor_threads.tensor_threads),
    "codecs": (codecs.CODECS, codecs.codecs),
    "codecs-wan": (codecs.CODECS_WAN, codecs.codecs_wan),
    "codecs-limited": (codecs.CODECS_LIMITED, codecs.codecs_limited),
    "same-host": (rounds.SAME_HOST, rounds.same_host),
    "async": (training.ASYNCHRONOUS, training.asynchronous),
    "streaming": (training.STREAMING, training.streaming),
    "heartbeat": (load.HEARTBEAT, load.heartbeat),
    "checkpoint": (rounds.CHECKPOINT, rounds.checkpoint),
    "groups": (rounds.GROUPS, rounds.groups),
    "wan": (wire.WAN, wire.wan),
    "attached": (training.ATTACHED, training.attached),
    "idle": (load.IDLE, load.idle),
    "largest": (load.LARGEST, load.largest),
}
# The largest comes last, when the trainers have given their memory back.
ALL = """
limits
transport
fold
round --workers 2,4,8 --reply-dtype fp32,bf16 --parameters 10M,50M
round --workers 2,4,8 --reply-dtype fp32,bf16 --parameters 125M --repeats 3
round-limit
tensor-threads
codecs --repeats 3
codecs-wan
codecs-limited
same-host
async
streaming
heartbeat
checkpoint --repeats 5
groups --repeats 5
wan --repeats 5
attached --steps 150
idle
largest
"""
QUICK = """
limits --repeats 3
transport --repeats 3
fold --repeats 3 --parameters 10M --pushers 1
round --repeats 3 --parameters 10M
round-limit --repeats 3 --parameters 10M
tensor-threads --repeats 3
codecs --repeats 1 --parameters 10M
same-host --repeats 3 --parameters 10M
async --repeats 3 --workers 2 --seconds 1
streaming --repeats 1 --steps 10
heartbeat --parameters 10M --workers 2
checkpoint --parameters 10M --workers 1
groups --repeats 3 --parameters 10M
wan --parameters 10M
attached --steps 20
idle --workers 100 --seconds 2
"""


@app.callback()
@with_version
def commands() -> None:
    """Measure the limits of this machine and what the product makes of them, as ratios."""


@app.command(name="all")
def everything(quick: Quick = False, out: Out = DEFAULT_OUT) -> None:
    """Every part, under half an hour on two cores (--quick: a minute and a half)."""
    if quick:
        run("quick", parts_of(QUICK), out, QUICK_RAW_BYTES)
    else:
        run("all", parts_of(ALL), out)


def parts_of(commands: str) -> Parts:
    """What these commands measure, by name."""
    app_command = typer.main.get_command(app)
    assert isinstance(app_command, typer.core.TyperGroup)
    found: Parts = {}
    for line in commands.strip().splitlines():
        name, *arguments = line.split()
        options = app_command.commands[name].make_context(name, arguments).params
        found |= parts(name, options)
    return found


def parts(command: str, options: Mapping[str, Any]) -> Parts:
    """What one command measures, by name; a part for each configuration of a round."""
    name, measure = COMMANDS[command]
    options = {key: value for key, value in options.items() if key != "out"}
    if measure is rounds.configurations:
        return rounds.configurations(**options)
    return {name: partial(measure, **options)}


def add_command(command: str) -> None:
    """Its options are the keywords of what measures and `--out`, its help the first sentence there."""
    name, measure = COMMANDS[command]

    def act(*, out: Path, **options: Any) -> None:
        run(name.replace(" ", "-").replace(",", ""), parts(command, options), out)

    declared = inspect.signature(measure, eval_str=True).parameters.values()
    options = [each for each in declared if each.name != "pool"]
    where = inspect.Parameter(
        "out", inspect.Parameter.KEYWORD_ONLY, default=DEFAULT_OUT, annotation=Out
    )
    act.__signature__ = inspect.Signature([*options, where])  # type: ignore[attr-defined]
    first_sentence = (inspect.getdoc(measure) or "").partition("\n\n")[0]
    app.command(name=command, help=first_sentence)(act)


for each_command in COMMANDS:
    add_command(each_command)


def run(name: str, parts: Parts, out: Path, raw_bytes: int = RAW_BYTES) -> None:
    """Measure some parts, print the tables, write the files."""
    bench = Experiment(COMMAND, out)
    if complaint := machine.complaint():
        bench.refuse(complaint)
    about = machine.describe()
    bench.say(", ".join(f"{key} {value}" for key, value in about.items()))
    if about["load"] > QUIET_LOAD:
        bench.say(
            "Other processes are at work here: ratios will be rough, times and tails too long."
        )
    machine.allow_many_files()
    with bench.folder(), ProcessPool(bench.logs(), raw_bytes) as pool:

        def failed(part: str) -> None:
            pool.skipped.append(f"{part}: FAILED, see above and {pool.folder}")
            pool.start_afresh()

        figures = bench.measure({name: partial(part, pool) for name, part in parts.items()}, failed)
    report = Report(
        command=bench.started_as,
        at=bench.at,
        seconds=round(bench.seconds, 1),
        machine=about,
        figures=(*figures, *rounds.growth(figures), *wire.of_all(pool.raw_samples)),
        skipped=tuple(pool.skipped),
    )
    write(report, bench.out / f"{name}-{bench.stamp}", bench.shown)
    bench.end((), (), ())


def write(report: Report, stem: Path, shown: Console) -> None:
    """Print the tables; write them and the figures beside each other."""
    with Path(f"{stem}.txt").open("w", encoding="utf-8") as file:
        for target in (shown, console(file=file, width=WIDTH)):
            target.print()
            for each in tables(report):
                target.print(each)
            for sentence in sentences(report):
                target.print(sentence, soft_wrap=True)
    Path(f"{stem}.json").write_text(json.dumps(report.plain(), indent=2) + "\n")
    written = f"{stem.name}.json and .txt are in {stem.parent}"
    shown.print(f"{report.seconds:.0f} s; {written}", soft_wrap=True)


if __name__ == "__main__":
    app(prog_name=COMMAND)
