"""`python -m diloco_lab.chaos`: the drill in every mode, its tables and its verdict; and `attack`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from diloco_lab.chaos.attacks.cli import attack
from diloco_lab.chaos.crew import MODES
from diloco_lab.chaos.drill import Options, drill, prepare_text
from diloco_lab.chaos.faults import SHORT, WHOLE
from diloco_lab.chaos.report import Report
from diloco_lab.chaos.table import NOTES, faults_table, figures_table
from diloco_protocol.clients.command_line import with_version
from diloco_tools.demo.data import DataError
from diloco_tools.processes import end_like_an_error_on_signals
from diloco_tools.terminal import console_for_tables, fail

COMMAND = "python -m diloco_lab.chaos"
app = typer.Typer(pretty_exceptions_enable=False)
WIDTH = 120  # of the tables where there is no terminal
REMARKS = ("dropped", "in_flight", "forgotten")  # pushes in no final version for a reason
MOST_REMARKS = 10  # of each mode; the audit prints all of them


@app.callback(invoke_without_command=True)
@with_version
def main(
    context: typer.Context,
    *,
    modes: Annotated[str, typer.Option(help="Which, with commas.")] = ",".join(MODES),
    out: Annotated[Path, typer.Option(help="Folder for results and logs.")] = Path("runs/chaos"),
    seed: Annotated[int, typer.Option(help="Decides faults, their order, and batches.")] = 0,
    short: Annotated[
        bool, typer.Option("--short", help="Fewer faults, and no calm run to compare with.")
    ] = False,
    durable: Annotated[
        bool, typer.Option("--durable", help="The broker saves each version before it tells of it.")
    ] = False,
    minutes: Annotated[float, typer.Option(help="The drill ends after so long, done or not.")] = 7,
) -> None:
    """Kill, stop, cut off and fill up a run of one broker and four workers, then audit it.

    One of the modes has two relays between them, which are killed and cut off, too.

    Everything runs on this machine. Prints what was survived and how much of
    the work is in the final parameters; ends with exit code 1 and a sentence
    for each broken promise. With `attack`: strangers and holders of keys attack
    a run instead.
    """
    if context.invoked_subcommand is not None:
        for name in context.params:
            source = context.get_parameter_source(name)
            if source is not None and source.name != "DEFAULT":
                behind = f"write options behind it: {COMMAND} {context.invoked_subcommand} --help"
                fail(COMMAND, f"--{name} before a command does nothing; {behind}", 2)
        return
    deadline = time.monotonic() + 60 * minutes
    chosen = [mode.strip() for mode in modes.split(",") if mode.strip()]
    if not chosen or not MODES.keys() >= set(chosen):
        choose = f"choose from {', '.join(MODES)}"
        fail(COMMAND, f"--modes {modes!r} has none or unknown ones; {choose}", 2)
    out = out.resolve()
    end_like_an_error_on_signals()
    torch.set_num_threads(1)
    shown = console_for_tables(WIDTH)

    def say(text: str) -> None:
        shown.print(text, soft_wrap=True)

    scale = SHORT if short else WHOLE
    asked = Options(out, scale, seed, deadline, durable=durable, with_calm=not short)
    reports: list[Report] = []
    try:
        held_out = prepare_text(asked.texts)
        for mode in chosen:
            faults = sum(scale.counts.values())
            say(f"{mode}: {faults} faults in at least {scale.rounds} rounds, logs in {out / mode}")
            reports.append(drill(mode, held_out, asked, say))
            (out / f"{mode}.json").write_text(json.dumps(reports[-1], indent=2) + "\n")
    except DataError as error:
        fail(COMMAND, str(error), 2)
    except OSError as error:
        fail(COMMAND, f"cannot work in {out} ({error}); name another folder with --out", 2)
    except KeyboardInterrupt:
        fail(COMMAND, "interrupted; the broker and the workers have been ended", 130)
    problems = _show(reports, shown)
    say(f"{', '.join(f'{mode}.json' for mode in chosen)} are in {out}")
    if problems:
        raise typer.Exit(1)


def _show(reports: list[Report], shown: Console) -> list[str]:
    """Print what came of it; returns a sentence for each broken promise."""
    shown.print(faults_table(reports))
    shown.print(figures_table(reports))
    said = list(NOTES)
    for report in reports:
        audit = report["audit"] or {}
        remarks = [each for name in REMARKS for each in audit.get(name, ())]
        said += [f"note    {report['mode']}: {each}" for each in remarks[:MOST_REMARKS]]
    problems = [sentence for report in reports for sentence in report["problems"]]
    for sentence in [*said, *(f"BROKEN  {each}" for each in problems)]:
        shown.print(sentence, soft_wrap=True)
    return problems


app.command()(attack)


if __name__ == "__main__":
    app(prog_name=COMMAND)
