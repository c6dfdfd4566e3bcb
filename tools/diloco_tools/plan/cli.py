"""`diloco-plan`: will my link do?"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from diloco_protocol.clients.command_line import with_version
from diloco_protocol.errors import UsageError
from diloco_tools.plan import quantities
from diloco_tools.plan.answer import answer
from diloco_tools.plan.page import write
from diloco_tools.plan.picture import curves, draw
from diloco_tools.plan.question import Question
from diloco_tools.plan.report import as_plain, as_text, found_as_text, search_hint
from diloco_tools.plan.search import search
from diloco_tools.plan.simulated.costs import Costs
from diloco_tools.plan.validation import as_plain as rows_as_plain
from diloco_tools.plan.validation import as_table, read, rows, summary
from diloco_tools.terminal import console, console_for_tables, fail

COMMAND = "diloco-plan"
WIDTH, WIDE = 80, 120  # of an answer and of the rows of a validation, where there is no terminal
MEASURED = Path("tools/lab/lan.json")
app = typer.Typer(pretty_exceptions_enable=False)
T = TypeVar("T")


def _read(parse: Callable[[str], T]) -> Callable[[Any], T]:
    """An option's parser: what is wrong is said as a sentence. (Defaults come as they are.)"""

    def read(text: Any) -> T:
        if not isinstance(text, str):
            return text  # type: ignore[no-any-return]  # a default
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return read


def _list(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    return lambda text: tuple(parse(each) for each in text.split(","))


def _delay(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit():
        raise ValueError(f"{text!r} is no number of steps; write 0, 5, or auto.")
    return int(text)


RATE, SECONDS, COUNT = map(_read, (quantities.rate, quantities.seconds, quantities.count))
SHARE, DELAY = _read(quantities.share), _read(_delay)
RATES, TIMES = _read(_list(quantities.both_ways)), _read(_list(quantities.seconds))


@app.callback(invoke_without_command=True)
@with_version
def main(  # noqa: PLR0913  an option for each thing that a run is made of
    context: typer.Context,
    *,
    parameters: Annotated[
        Any, typer.Option(metavar="N", parser=COUNT, help="Of the model: 124M, 7B.")
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", help="That train.")] = 2,
    broker_link: Annotated[
        Any, typer.Option(metavar="RATE", parser=RATE, help="The broker's line, each way: 1G.")
    ] = "1G",
    link: Annotated[
        Any,
        typer.Option(
            metavar="RATE[,RATE]",
            parser=RATES,
            help="A worker's line, each way; 40M/250M: up and down. Of a list they have one each, in "
            "turn. By default as fast as the broker's.",
        ),
    ] = None,
    delay: Annotated[
        Any,
        typer.Option(
            metavar="TIME[,TIME]", parser=TIMES, help="To the broker and back, as ping says: 20ms."
        ),
    ] = "1ms",
    step_time: Annotated[
        Any, typer.Option(metavar="TIME", parser=SECONDS, help="Of an inner step: 0.5s.")
    ] = "1s",
    sync_every: Annotated[
        int, typer.Option("--sync-every", "-H", metavar="H", help="Inner steps between two pushes.")
    ] = 500,
    num_fragments: Annotated[
        int, typer.Option("--num-fragments", "--fragments", "-P", metavar="P", help="Fragments.")
    ] = 1,
    fragment_sync_delay: Annotated[
        Any,
        typer.Option(
            "--fragment-sync-delay",
            "--tau",
            metavar="TAU",
            parser=DELAY,
            help="Steps from a push to the merge of the reply; auto: when it is here. Default: 0, "
            "with several fragments auto.",
        ),
    ] = None,
    wire_dtype: Annotated[
        str, typer.Option(metavar="CODEC", help="Of pushes: bf16, fp32, int8, int4, int4z.")
    ] = "bf16",
    reply_dtype: Annotated[str, typer.Option(metavar="CODEC", help="Of replies.")] = "fp32",
    mode: Annotated[str, typer.Option(help="sync or async.")] = "sync",
    whole: Annotated[
        bool,
        typer.Option(
            "--whole", help="Pushes count whole: --deterministic, an aggregate, a quorum."
        ),
    ] = False,
    keys: Annotated[bool, typer.Option("--keys", help="Everything is encrypted.")] = False,
    sites: Annotated[
        int,
        typer.Option(metavar="N", help="Places with as many workers each; the broker is at one."),
    ] = 1,
    site_link: Annotated[
        Any,
        typer.Option(metavar="RATE", parser=RATE, help="Line of a site, which its workers share."),
    ] = None,
    relays: Annotated[
        bool,
        typer.Option(
            "--relays",
            help="A relay at each site averages its workers' pushes and sends one: diloco-broker relay.",
        ),
    ] = False,
    lan_link: Annotated[
        Any, typer.Option(metavar="RATE", parser=RATE, help="A worker's line within its site.")
    ] = "10G",
    fails_every: Annotated[
        Any, typer.Option(metavar="TIME", parser=SECONDS, help="Mean between failures of a worker.")
    ] = None,
    back_after: Annotated[
        Any, typer.Option(metavar="TIME", parser=SECONDS, help="Until it is started again.")
    ] = "5min",
    dies_unnoticed: Annotated[
        bool,
        typer.Option(
            "--dies-unnoticed",
            help="Its machine or line goes, so the broker waits for its time-out.",
        ),
    ] = False,
    target: Annotated[
        Any,
        typer.Option(
            metavar="SHARE", parser=SHARE, help="Which H, P, tau and codec have this share: 95%."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A picture over the speed of the lines. Needs matplotlib."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Will my link do? How much of the time would be training, and what does the broker need?

    diloco-plan --parameters 1B --workers 8 --broker-link 1G --delay 20ms

    The broker's and the workers' own rules decide in it, over lines and cores
    that are simulated. Speeds are bits a second, each way. `validate` holds it
    against rounds that were measured through rate-limited lines.
    """
    if context.invoked_subcommand is not None:
        return
    if parameters is None:
        fail(COMMAND, "how large is the model? --parameters 124M, or --parameters 7B.", 2)
    several = num_fragments > 1
    lines = link or ((broker_link, broker_link),)
    is_lopsided = any(up != down for up, down in lines)
    is_given = context.get_parameter_source("fragment_sync_delay").name != "DEFAULT"  # type: ignore[union-attr]
    delay_steps = fragment_sync_delay if is_given else (None if several else 0)
    try:
        question = Question(
            parameters=parameters,
            workers=workers,
            broker_link=broker_link,
            links=tuple(up for up, _ in lines),
            links_down=tuple(down for _, down in lines) if is_lopsided else None,
            delays=delay,
            step_s=step_time,
            sync_every=sync_every,
            fragments=num_fragments,
            delay_steps=delay_steps,
            wire_dtype=wire_dtype,
            reply_dtype=reply_dtype,
            mode=mode,
            is_whole=whole,
            has_keys=keys,
            sites=sites,
            site_link=site_link,
            has_relays=relays,
            lan_link=lan_link,
            fails_every_s=fails_every,
            back_after_s=back_after,
            dies_unnoticed=dies_unnoticed,
        )
        _answer(question, target, plot, as_json=as_json)
    except UsageError as error:
        fail(COMMAND, str(error), 2)


@app.command()
def validate(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What make lan has measured.")
    ] = MEASURED,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table into this page, too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Hold the planner against rounds that were measured: a row for each, with its error."""
    try:
        recorded = read(file)
        with _progress().status("Simulating each row ..."):
            found = rows(recorded)
        if page is not None:
            write(page, found, recorded)
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
            searched = search(question, target, costs, lambda _: status.update("Searching ..."))
    if as_json:
        typer.echo(json.dumps(as_plain(found, searched)))
    else:
        shown.print(as_text(found))
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
    if find_spec("matplotlib") is None:  # before minutes are spent on curves that cannot be drawn
        fail(COMMAND, "the picture needs matplotlib: pip install 'diloco-broker[plot]'", 1)
    with progress.status("Drawing ...") as status:
        found = curves(question, costs, lambda name: status.update(f"Drawing {name} ..."))
        try:
            draw(question, found, path, target)
        except (OSError, ValueError) as error:
            fail(COMMAND, f"{path} cannot be written: {error}", 1)
    progress.print(f"The picture is in {path}")
