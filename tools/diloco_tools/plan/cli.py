"""`diloco-plan`: is my link fast enough?"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from diloco_protocol.clients.command_line import App, with_options
from diloco_protocol.errors import UsageError
from diloco_tools.options import options_of, reads
from diloco_tools.plan import quantities
from diloco_tools.plan.answer import answer
from diloco_tools.plan.picture import curves, draw
from diloco_tools.plan.question import MOST_USED, RUN, Question
from diloco_tools.plan.report import as_plain, as_text, found_as_text, search_hint, warnings
from diloco_tools.plan.search import search
from diloco_tools.plan.simulated.costs import Costs
from diloco_tools.plan.validation import as_plain as rows_as_plain
from diloco_tools.plan.validation import as_table, read, rows, summary, write_page
from diloco_tools.terminal import console, console_for_tables, fail

COMMAND = "diloco-plan"
# Columns of an answer and of a validation if the output is not a terminal.
WIDTH, WIDE = 80, 120
MEASURED = Path("tools/lab/lan.json")
app = App()


def _delay(text: str) -> int | str:
    if text != "auto" and not text.isdigit():
        raise ValueError(f"{text!r} is not a number of steps; use 0, 5, or auto.")
    return text if text == "auto" else int(text)


@app.callback(invoke_without_command=True)
@with_options(options_of(Question))
def main(
    context: typer.Context,
    *,
    link: Annotated[
        Any,
        typer.Option(
            metavar="RATE[,RATE]",
            parser=reads(quantities.several(quantities.both_ways)),
            help="A worker's link, each way; 40M/250M: up and down. A list is for the workers in turn. "
            "Default: the broker's rate.",
            rich_help_panel=MOST_USED,
        ),
    ] = None,
    fragment_sync_delay: Annotated[
        Any,
        typer.Option(
            "--fragment-sync-delay",
            "--tau",
            metavar="TAU",
            parser=reads(_delay),
            help="Steps from a push to the merge of the reply; auto: merge on arrival. Default: 0, "
            "with several fragments auto.",
            rich_help_panel=RUN,
        ),
    ] = None,
    target: Annotated[
        Any,
        typer.Option(
            metavar="SHARE",
            parser=reads(quantities.share),
            help="Search for H, P, tau and codecs that reach this share: 95%.",
            rich_help_panel=MOST_USED,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Plot the share over the speed of the links. Needs matplotlib."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **given: Any,
) -> None:
    """Is my link fast enough? Estimates the share of time in training, and the broker's load.

    diloco-plan --parameters 1B --workers 8 --broker-link 1G --delay 20ms

    Runs the broker's and the workers' own rules over simulated links and cores.
    Rates are bits a second, each way. `validate` compares it with rounds that
    were measured over rate-limited links.
    """
    if context.invoked_subcommand is not None:
        return
    if given["parameters"] is None:
        fail(COMMAND, "the size of the model is missing: give --parameters 124M, for example.", 2)
    lines = link or ((given["broker_link"], given["broker_link"]),)
    is_lopsided = any(up != down for up, down in lines)
    is_auto = fragment_sync_delay == "auto"
    if fragment_sync_delay is None:
        is_auto = given["fragments"] > 1
    try:
        question = Question(
            **given,
            links=tuple(up for up, _ in lines),
            links_down=tuple(down for _, down in lines) if is_lopsided else None,
            delay_steps=None if is_auto else fragment_sync_delay or 0,
        )
        _answer(question, target, plot, as_json=as_json)
    except UsageError as error:
        fail(COMMAND, str(error), 2)


@app.command()
def validate(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Measurements of make lan.")
    ] = MEASURED,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table into this page, too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare predictions with measured rounds: a row for each, with its error."""
    try:
        recorded = read(file)
        with _progress().status("Simulating each row ..."):
            found = rows(recorded)
        if page is not None:
            write_page(page, found, recorded)
    except UsageError as error:
        fail(f"{COMMAND} validate", str(error), 2)
    if as_json:
        typer.echo(json.dumps(rows_as_plain(found)))
        return
    shown = console_for_tables(WIDE)
    shown.print(as_table(found))
    shown.print(Text("\n" + summary(found)))


def _progress() -> Console:
    return console(stderr=True)


def _answer(question: Question, target: float | None, plot: Path | None, *, as_json: bool) -> None:
    progress = _progress()
    shown = console_for_tables(WIDTH)
    costs = Costs()
    with progress.status("Simulating ...") as status:
        found = answer(question, costs)
        searched = None
        if target is not None:
            status.update("Searching ...")
            searched = search(question, target, costs)
    if as_json:
        typer.echo(json.dumps(as_plain(found, searched)))
    else:
        shown.print(as_text(found))
        for warning in warnings(found):
            shown.print()
            shown.print(Text(warning, "yellow"))
        if searched is not None:
            shown.print()
            shown.print(found_as_text(searched))
        elif (hint := search_hint(found)) is not None:
            shown.print()
            shown.print(Text(hint))
    if plot is not None:
        _plot(question, costs, plot, target, progress)


def _plot(
    question: Question, costs: Costs, path: Path, target: float | None, progress: Console
) -> None:
    if find_spec("matplotlib") is None:  # checked before minutes of simulation
        fail(COMMAND, "--plot needs matplotlib: pip install 'diloco-broker[plot]'", 1)
    with progress.status("Drawing ...") as status:
        found = curves(question, costs, lambda name: status.update(f"Drawing {name} ..."))
        try:
            draw(question, found, path, target)
        except (OSError, ValueError) as error:
            fail(COMMAND, f"{path} cannot be written: {error}", 1)
    progress.print(f"wrote {path}")
