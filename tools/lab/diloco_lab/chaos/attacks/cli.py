"""`python -m diloco_lab.chaos attack`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from diloco_lab.chaos.attacks import poison, watch
from diloco_lab.chaos.attacks.drill import Options, drill, poisons
from diloco_lab.chaos.attacks.report import NOTES, poisons_table, table
from diloco_tools.processes import ChildFailed, end_like_an_error_on_signals
from diloco_tools.terminal import console_for_tables, fail

COMMAND = "python -m diloco_lab.chaos attack"
WIDTH = 130  # of the table where there is no terminal


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
    end_like_an_error_on_signals()
    if not watch.OWN_MEMORY.exists():
        fail(
            COMMAND, "the broker's memory is read from /proc, which this system lacks; use Linux", 2
        )
    out = out.resolve()
    shown = console_for_tables(WIDTH)
    words = tuple(each.strip() for each in only.split(",") if each.strip())
    options = replace(Options.quick(out) if quick else Options(out), seed=seed, names=words)
    if not any(options.wanted(has_keys=has_keys) for has_keys in (False, True)):
        fail(COMMAND, f"--only {only!r} is in no attack's name", 2)
    try:
        rows, problems = drill(options, lambda text: shown.print(text, soft_wrap=True))
        poisoned = []
        try:
            poisoned = [] if quick or words else poisons(options)
        except ChildFailed as error:
            problems.append(str(error))
        problems += [sentence for row in rows for sentence in row.broken()]
        problems += poison.broken(poisoned)
        document = {
            "rows": [row.plain() for row in rows],
            "poisons": poisoned,
            "problems": problems,
        }
        (out / "attack.json").write_text(json.dumps(document, indent=2) + "\n")
    except ChildFailed as error:
        fail(COMMAND, str(error), 1)
    except OSError as error:
        fail(COMMAND, f"cannot work in {out} ({error}); name another folder with --out", 2)
    except KeyboardInterrupt:
        fail(COMMAND, "interrupted; the broker and the workers have been ended", 130)
    shown.print(table(rows))
    if poisoned:
        shown.print(poisons_table(poisoned))
    for sentence in [*NOTES, *(f"BROKEN  {each}" for each in problems)]:
        shown.print(sentence, soft_wrap=True)
    if problems:
        raise typer.Exit(1)
    shown.print(
        f"Nothing got through, and every bound held; attack.json is in {out}", soft_wrap=True
    )
