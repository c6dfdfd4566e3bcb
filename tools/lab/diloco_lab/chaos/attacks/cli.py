"""`python -m diloco_lab.chaos attack`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from diloco_lab.chaos.attacks import poison, watch
from diloco_lab.chaos.attacks.drill import Options, drill, poisons
from diloco_lab.chaos.attacks.report import NOTES, poisons_table, table
from diloco_lab.driver.experiment import Experiment
from diloco_lab.driver.options import words
from diloco_tools.processes import ChildFailed

COMMAND = "python -m diloco_lab.chaos attack"


def attack(
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Under a minute: shorter, and fewer of them.")
    ] = False,
    only: Annotated[
        str, typer.Option(help="Attacks whose names have one of these words in them, with commas.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder for results and logs.")] = Path("runs/attack"),
    seed: Annotated[int, typer.Option(help="Decides random messages.")] = 0,
) -> None:
    """Attack a broker with two training workers, without keys and with: under four minutes.

    Everything runs on this machine. Prints what each attack tried, what got
    through (nothing should) and what it cost; ends with exit code 1 where
    something got through or a bound was broken.
    """
    experiment = Experiment(COMMAND, out)
    if not watch.OWN_MEMORY.exists():
        experiment.refuse(
            "the broker's memory is read from /proc, which this system lacks; use Linux"
        )
    folder, names = experiment.out, tuple(words(only))
    options = replace(Options.quick(folder) if quick else Options(folder), seed=seed, names=names)
    if not any(options.wanted(has_keys=has_keys) for has_keys in (False, True)):
        experiment.refuse(f"--only {only!r} is in no attack's name")
    with experiment.folder():
        rows, problems = drill(options, experiment.say)
        poisoned = []
        try:
            poisoned = [] if quick or names else poisons(options)
        except ChildFailed as error:
            problems.append(str(error))
        problems += [sentence for row in rows for sentence in row.broken()]
        problems += poison.broken(poisoned)
        document = {
            "rows": [row.plain() for row in rows],
            "poisons": poisoned,
            "problems": problems,
        }
        experiment.save("attack.json", document)
    experiment.end([table(rows), *([poisons_table(poisoned)] if poisoned else [])], NOTES, problems)
    experiment.say(f"Nothing got through, and every bound held; attack.json is in {experiment.out}")
