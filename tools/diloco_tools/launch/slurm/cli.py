"""`diloco-launch slurm`: writes the jobs of a run, submits them, shows them, stops them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from diloco_protocol.clients.command_line import App, failing_in_a_sentence, with_options
from diloco_protocol.clients.help_page import Group
from diloco_protocol.errors import UsageError
from diloco_tools.launch.commands import (
    COMMAND,
    MONITOR,
    OPERATOR,
    check_serve_options,
    serve_words,
)
from diloco_tools.launch.slurm import folder as folders
from diloco_tools.launch.slurm import jobs
from diloco_tools.launch.slurm.scripts import BROKER, ISLANDS, SlurmRun
from diloco_tools.options import options_of
from diloco_tools.terminal import console_for_tables

WIDTH = 110  # columns of the table if the output is not a terminal


class StartsByDefault(Group):
    """`slurm --islands 4 ...` means `slurm start --islands 4 ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args.insert(0, "start")
        return super().parse_args(ctx, args)


app = App(cls=StartsByDefault, no_args_is_help=True)


@app.callback()
def slurm() -> None:
    """Run on Slurm: one job for the broker, and one for each island (a worker of one or more nodes).

    `diloco-launch slurm --islands 4 --time 12:00:00 --submit -- torchrun ... train.py`
    is short for `slurm start`.
    """


@app.command()
@with_options(options_of(SlurmRun))
def start(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...", help="Command that starts the training on each node, after --."
        ),
    ],
    *,
    islands: Annotated[int, typer.Option(min=1, help="Workers: jobs that fail independently.")],
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run, on a file system that all nodes share. Default: runs/NAME."
        ),
    ] = None,
    serve: Annotated[
        str,
        typer.Option(help="Options of diloco-broker serve: '--sync-every 500 --max-rounds 100'."),
    ] = "",
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            help="Option of sbatch for islands: --sbatch=--gpus-per-node=8; may be repeated."
        ),
    ] = None,
    broker_sbatch: Annotated[
        list[str] | None,
        typer.Option(help="The same for the broker: --broker-sbatch=--cpus-per-task=4."),
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the jobs, too.")] = False,
    **given: Any,
) -> None:
    """Write the scripts, keys and folder of a run; --submit starts it."""
    with failing_in_a_sentence(COMMAND):
        here = Path.cwd()
        run = SlurmRun(
            folder=_shared(here / (folder or Path("runs") / given["name"])),
            start_in=_shared(here),
            python=sys.executable,
            command=tuple(command),
            islands=islands,
            serve=serve_words(serve),
            sbatch=_options(sbatch),
            broker_sbatch=_options(broker_sbatch),
            **given,
        )
        check_serve_options(run.serve_options, here)
        folders.write(run)
        typer.echo(f"{run.folder} has the run {run.name}: {BROKER}, {ISLANDS}, keys, logs.")
        if submit:
            broker, array = jobs.submit(run)
            typer.echo(f"Submitted: job {broker} (broker), array {array} (islands).")
            typer.echo(f"Status: diloco-launch slurm status {shlex.quote(str(run.folder))}")
        else:
            for script in (BROKER, ISLANDS):
                typer.echo(f"sbatch {shlex.quote(str(run.folder / script))}")


@app.command()
def status(
    folder: Annotated[Path, typer.Argument(help="Folder of the run.")],
) -> None:
    """Show the jobs of a run, and the status of its broker."""
    with failing_in_a_sentence(COMMAND):
        run = folders.read(folder.absolute())
        jobs.check_there()
        rows = jobs.queued(run)
    if rows:
        console_for_tables(WIDTH).print(_table(run, rows))
    else:
        typer.echo(
            f"No job of the run {run.name} is in the queue: it is over, or was not submitted."
        )
        typer.echo(
            f"Last line of the broker's log: {folders.last_line(run.folder / 'logs' / 'broker.log')}"
        )
    if any(job.name == run.broker_job and job.state == "RUNNING" for job in rows):
        key = run.folder / folders.KEYS / "clients" / f"operator-{OPERATOR}.key"
        words = ["status", "--address", run.address, "--keys", str(key)]
        sys.stdout.flush()
        subprocess.run([sys.executable, "-m", "diloco_broker", *words], check=False, timeout=60)
        shown = run.folder / folders.KEYS / "clients" / f"monitor-{MONITOR}.key"
        typer.echo(f"diloco-top {run.address} --keys {shlex.quote(str(shown))}")


@app.command()
def stop(
    folder: Annotated[Path, typer.Argument(help="Folder of the run.")],
    *,
    within: Annotated[
        float,
        typer.Option(min=0, help="Seconds for the islands to leave, and for the broker to save."),
    ] = 120.0,
) -> None:
    """Stop the islands, then have the broker save. `slurm start` with the same folder continues."""
    with failing_in_a_sentence(COMMAND):
        run = folders.read(folder.absolute())
        jobs.stop(run, within, typer.echo)
    typer.echo(f"The run {run.name} is stopped; its checkpoints are in {run.folder}/broker.")


def _table(run: SlurmRun, rows: list[jobs.Job]) -> Table:
    cells = []
    for job in rows:
        who = f"island-{job.island}" if job.name == run.islands_job else "broker"
        state = job.state if job.reason in ("None", "") else f"{job.state} ({job.reason})"
        last = folders.last_line(run.folder / folders.LOGS / f"{who}.log")
        cells.append((who, job.number, state, job.elapsed, job.nodes, last))
    heads = ("WHO", "JOB", "STATE", "TIME", "NODES", "LAST LINE OF ITS LOG")
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head, width in zip(heads, widths, strict=True):  # only the last column is cut
        least = None if head == heads[-1] else width
        table.add_column(head, min_width=least, overflow="ellipsis", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    return table


def _shared(path: Path) -> Path:
    """An absolute path that can stand in a batch script and in an address."""
    path = path.absolute()
    if not str(path).isprintable() or "%" in str(path):
        raise UsageError(f"The path {str(path)!r:.200} has characters that Slurm would interpret.")
    return path


def _options(given: list[str] | None) -> tuple[str, ...]:
    for each in given or ():
        if not each.startswith("-") or not each.isprintable():
            raise UsageError(
                f"{each!r:.80} is not an option of sbatch; expected one like --sbatch=--partition=gpu."
            )
    return tuple(given or ())
