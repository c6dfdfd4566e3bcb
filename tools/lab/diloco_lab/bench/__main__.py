"""`python -m diloco_lab.bench`: this machine's limits and the product against them, part by part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from diloco_lab.bench.parts import codecs, load, rounds, training, wire
from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.bench.report.figures import Figure, Report, sentences, tables
from diloco_lab.driver import machine
from diloco_lab.driver.experiment import Experiment
from diloco_protocol.clients.command_line import with_version
from diloco_tools.terminal import console

COMMAND = "python -m diloco_lab.bench"
ALL = "all"
app = typer.Typer(pretty_exceptions_enable=False)
RAW_BYTES, QUICK_RAW_BYTES = 512 << 20, 128 << 20  # moved by one measurement of raw TCP
QUIET_LOAD = 0.7  # of the last minute; above it the figures are those of a busy machine
WIDTH = 130  # of the tables without a terminal
Settings = Mapping[str, Any]
SMALL = {"size": "10M", "repeats": 3}


class Part(NamedTuple):
    """A function, and the settings that it is called with one after another: all, and with `--quick`."""

    measure: Callable[..., list[Figure]]
    whole: Sequence[Settings]
    quick: Sequence[Settings]


def _rounds(sizes: Sequence[str], repeats: int) -> list[Settings]:
    return [
        {"size": size, "workers": workers, "reply": reply, "repeats": repeats}
        for size, workers, reply in product(sizes, (2, 4, 8), ("fp32", "bf16"))
    ]


PARTS: Mapping[str, Part] = {
    "round": Part(
        rounds.whole_round,
        [*_rounds(("10M", "50M"), 5), *_rounds(("125M",), 3)],
        [{**SMALL, "workers": 2, "reply": "fp32"}],
    ),
    "keys": Part(rounds.with_keys, [{}], [SMALL]),
    "same-host": Part(rounds.same_host, [{}], [SMALL]),
    "table": Part(
        codecs.table,
        [
            {"size": size, "workers": workers}
            for size, workers in product(("10M", "50M", "125M"), (2, 4))
        ],
        [{**SMALL, "workers": 2}],
    ),
    "codecs": Part(codecs.codecs, [{}], [{"size": "10M", "repeats": 1}]),
    "streaming": Part(training.streaming, [{}], [{"steps": 10, "repeats": 1}]),
    "heartbeat": Part(load.heartbeat, [{}], [{"size": "10M", "workers": 2}]),
    "wan": Part(wire.wan, [{"repeats": 5}], [SMALL]),
    "attached": Part(training.attached, [{}], [{"steps": 20}]),
    "idle": Part(load.idle, [{}], [{"workers": 100, "seconds": 2.0}]),
}


@app.command()
@with_version
def main(
    parts: Annotated[
        list[str],
        typer.Argument(help=f"Which parts: {', '.join(PARTS)}; or {ALL}.", show_default=False),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute and a half: small models, few repeats.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for JSON, table and logs.")] = Path(
        "runs/bench"
    ),
) -> None:
    """Measure the limits of this machine, and the product against them, as ratios.

    All parts take under half an hour on two cores.
    """
    bench = Experiment(COMMAND, out)
    for name in parts:
        if name not in (ALL, *PARTS):
            bench.refuse(f"unknown part {name!r}; choose from {', '.join(PARTS)} or {ALL}")
    if complaint := machine.complaint():
        bench.refuse(complaint)
    wanted = [name for name in PARTS if ALL in parts or name in parts]
    measured = {}
    for name in wanted:
        for settings in PARTS[name].quick if quick else PARTS[name].whole:
            told = ", ".join(f"{option} {value}" for option, value in settings.items())
            measured[f"{name}  {told}"] = partial(PARTS[name].measure, **settings)
    about = machine.describe()
    bench.say(", ".join(f"{key} {value}" for key, value in about.items()))
    if about["load"] > QUIET_LOAD:
        bench.say("Other processes are running: ratios will be rough, times and tails too long.")
    machine.allow_many_files()
    raw_bytes = QUICK_RAW_BYTES if quick else RAW_BYTES
    with bench.folder(), ProcessPool(bench.logs(), raw_bytes) as pool:

        def failed(part: str) -> None:
            pool.skipped.append(f"{part}: FAILED, see above and {pool.folder}")
            pool.start_afresh()

        figures = bench.measure({name: partial(of, pool) for name, of in measured.items()}, failed)
    report = Report(
        command=bench.started_as,
        at=bench.at,
        seconds=round(bench.seconds, 1),
        machine=about,
        figures=(*figures, *rounds.growth(figures), *wire.of_all(pool.raw_samples)),
        skipped=tuple(pool.skipped),
    )
    name = "quick" if quick else "-".join(parts)
    write(report, bench.out / f"{name}-{bench.stamp}", bench.shown)
    bench.end((), (), ())


def write(report: Report, stem: Path, shown: Console) -> None:
    """Print the tables; write them, as text and Markdown, and the figures beside each other."""
    about = ", ".join(f"{key} {value}" for key, value in report.machine.items())
    page = [f"`{report.command}`, {report.at}; {about}.", *sentences(report)]
    for each in tables(report):
        page += [f"## {each.title}", "\n".join(each.lines())]
    Path(f"{stem}.md").write_text("\n\n".join(page) + "\n")
    with Path(f"{stem}.txt").open("w", encoding="utf-8") as file:
        for target in (shown, console(file=file, width=WIDTH)):
            target.print()
            for each in tables(report):
                target.print(each)
            for sentence in sentences(report):
                target.print(sentence, soft_wrap=True)
    Path(f"{stem}.json").write_text(json.dumps(report.plain(), indent=2) + "\n")
    written = f"{stem.name}.json, .md and .txt are in {stem.parent}"
    shown.print(f"{report.seconds:.0f} s; {written}", soft_wrap=True)


if __name__ == "__main__":
    app(prog_name=COMMAND)
