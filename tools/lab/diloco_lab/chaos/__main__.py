"""`python -m diloco_lab.chaos`: the drill in every mode, its tables and its verdict; and `attack`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from diloco_lab.chaos.attacks import drill as attacks
from diloco_lab.chaos.attacks import report as attack_report
from diloco_lab.chaos.crew import MODES
from diloco_lab.chaos.drill import drill, prepare_text
from diloco_lab.chaos.faults import SHORT, WHOLE, Scale
from diloco_lab.chaos.report import Report, faults_table, figures_table
from diloco_lab.driver import machine
from diloco_lab.driver.experiment import Experiment
from diloco_lab.driver.options import words
from diloco_protocol.clients.command_line import with_version
from diloco_tools.terminal import fail

COMMAND = "python -m diloco_lab.chaos"
app = typer.Typer(pretty_exceptions_enable=False)
WIDTH = 120  # of the tables without a terminal
NOTE = "What the figures mean: docs/faults.md."
MOST_REMARKS = 10  # of each mode; the audit prints all of them


@app.callback(invoke_without_command=True)
@with_version
def main(
    context: typer.Context,
    *,
    modes: Annotated[str, typer.Option(help="Modes, with commas.")] = ",".join(MODES),
    out: Annotated[Path, typer.Option(help="Folder for results and logs.")] = Path("runs/chaos"),
    seed: Annotated[int, typer.Option(help="Seed of the faults, their order, and batches.")] = 0,
    short: Annotated[bool, typer.Option("--short", help="Fewer faults and rounds.")] = False,
) -> None:
    """Kill, stop and cut off processes of a run with four workers, fill its disk, and audit it.

    One of the modes has two relays, which are killed and cut off, too.

    Everything runs on this machine. Prints the faults that the run survived and
    the share of the work in the final parameters; the exit code is 1 if a
    promise was broken, with a message for each. `attack` instead attacks a run,
    with and without keys.
    """
    if context.invoked_subcommand is not None:
        for name in context.params:
            source = context.get_parameter_source(name)
            if source is not None and source.name != "DEFAULT":
                after = f"give options after it: {COMMAND} {context.invoked_subcommand} --help"
                fail(COMMAND, f"--{name} before a command has no effect; {after}", 2)
        return
    experiment = Experiment(COMMAND, out, width=WIDTH)
    chosen = words(modes)
    if not chosen or not MODES.keys() >= set(chosen):
        choose = f"choose from {', '.join(MODES)}"
        experiment.refuse(f"--modes {modes!r}: unknown or no mode; {choose}")
    if complaint := machine.complaint():
        experiment.refuse(complaint)
    torch.set_num_threads(1)
    with experiment.folder() as folder:
        reports = list(_reports(experiment, chosen, SHORT if short else WHOLE, seed))
    experiment.say(f"{', '.join(f'{mode}.json' for mode in chosen)} are in {folder}")
    problems = [sentence for report in reports for sentence in report["problems"]]
    tables = faults_table(reports), figures_table(reports)
    experiment.end(tables, [NOTE, *_remarks(reports)], problems)


def _reports(
    experiment: Experiment, modes: Sequence[str], scale: Scale, seed: int
) -> Iterator[Report]:
    """Run one mode after the other, and write its report to MODE.json."""
    for mode in modes:
        (experiment.out / f"{mode}.json").unlink(missing_ok=True)  # of an earlier drill
    prepare_text(experiment.out)
    for mode in modes:
        faults = sum(scale.of(MODES[mode].relays).counts.values())
        logs = experiment.out / mode
        experiment.say(f"{mode}: {faults} faults in at least {scale.rounds} rounds, logs in {logs}")
        report = drill(mode, experiment.out, scale, seed)
        experiment.save(f"{mode}.json", report)
        yield report


def _remarks(reports: list[Report]) -> Iterator[str]:
    """Pushes that are in no final version, with the reason."""
    for report in reports:
        remarks = report["audit"]["remarks"] if report["audit"] else []
        yield from (f"note    {report['mode']}: {each}" for each in remarks[:MOST_REMARKS])


@app.command()
def attack(
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Under a minute: shorter, and fewer of them.")
    ] = False,
    only: Annotated[
        str, typer.Option(help="Attacks whose names contain one of these texts, with commas.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder for results and logs.")] = Path("runs/attack"),
) -> None:
    """Attack a broker with two training workers, without keys and with: under four minutes.

    Everything runs on this machine. Prints what each attack tried, what got
    through (nothing should) and its cost; the exit code is 1 if something got
    through or a bound was broken.
    """
    experiment = Experiment(f"{COMMAND} attack", out)
    if complaint := machine.complaint():
        experiment.refuse(complaint)
    options = attacks.Options(experiment.out, quick, tuple(words(only)))
    if not any(options.wanted(has_keys=has_keys) for has_keys in (False, True)):
        experiment.refuse(f"--only {only!r} is in the name of none of the attacks")
    with experiment.folder():
        rows, problems = attacks.drill(options, experiment.say)
        problems += [sentence for row in rows for sentence in row.broken()]
        plain = [row.plain() for row in rows]
        experiment.save("attack.json", {"rows": plain, "problems": problems})
    experiment.end([attack_report.table(rows)], [NOTE], problems)
    experiment.say(f"Nothing got through, and every bound held; attack.json is in {experiment.out}")


if __name__ == "__main__":
    app(prog_name=COMMAND)
