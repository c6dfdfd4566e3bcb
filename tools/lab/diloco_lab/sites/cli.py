"""`make sites`: two sites behind a slow line, with all workers at the hub and with a relay at each."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from diloco_lab.bench import machine
from diloco_lab.bench.limited_network import NoNetwork, why_not
from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.bench.sizes import SIZES
from diloco_lab.sites import tables
from diloco_lab.sites.losing import losses
from diloco_lab.sites.measuring import DELAY_S, SITES, WAN, WORKERS, Place, rounds
from diloco_lab.sites.network import sites_network
from diloco_lab.sites.records import WAYS, BadFile, Measurement, SitesFile, Trained, read
from diloco_lab.sites.training import training
from diloco_tools import terminal
from diloco_tools.processes import ChildFailed, end_like_an_error_on_signals

COMMAND = "python -m diloco_lab.sites"
SKIPPED = 3  # exit code where there can be no such network
WIDTH = 130  # of the tables where there is no terminal
PAGE = "SITES.md"  # beside the file of measurements
PAIRS = (("bf16", "fp32"), ("int4z", "int4z"))
TINY = "0.4M"  # what is lost is seen as well with a small model

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
refuse = partial(terminal.fail, COMMAND, code=2)


def _known_size(text: str) -> str:
    if text not in SIZES:
        refuse(f"--parameters {text!r} is unknown here; choose from {', '.join(SIZES)}")
    return text


@app.command()
def sites(  # noqa: PLR0917  each is an option of the command
    quick: Annotated[
        bool, typer.Option("--quick", help=f"A minute or two: {TINY} parameters, nothing lost.")
    ] = False,
    parameters: Annotated[
        str, typer.Option(callback=_known_size, help=f"The model: {', '.join(SIZES)}.")
    ] = "10M",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each configuration.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results and logs.")] = Path(
        "runs/sites"
    ),
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"Put the results into this file, too, and into {PAGE} beside it, if it is there.",
        ),
    ] = None,
    skip_is_success: Annotated[
        bool,
        typer.Option(
            "--skip-is-success", help="End with 0 instead of 3 where it cannot be measured."
        ),
    ] = False,
    only_page: Annotated[
        bool, typer.Option("--page", help=f"Measure nothing; write what --into has into {PAGE}.")
    ] = False,
) -> None:
    """Measure rounds of two sites behind a slow line: a star, and a relay at each site.

    Then lose a relay, a line and the hub, and see how long each is missed. Takes
    root and Linux, and some minutes on two cores. Nothing of it can be seen from
    your own network. Where it cannot be made the reason is said; exit code 3.
    """
    if only_page:
        if into is None:
            refuse("--page takes the file of measurements: --into tools/lab/sites.json")
        _write_page(into)
        return
    if into is not None and not os.access(into if into.exists() else into.parent, os.W_OK):
        refuse(f"--into {into} cannot be written; name a file in a folder that is there")
    try:
        found = _measure(TINY if quick else parameters, 1 if quick else repeats, not quick, out)
    except NoNetwork as error:
        skipped = 0 if skip_is_success else SKIPPED
        terminal.fail(COMMAND, f"skipped: {error}", skipped)
    except ChildFailed as error:
        terminal.fail(COMMAND, str(error), 1)
    except KeyboardInterrupt:
        terminal.fail(COMMAND, "interrupted; its processes and networks are gone", 130)
    (out / "sites.json").write_text(found.text(), encoding="utf-8")
    if into is not None:
        into.write_text(found.text(), encoding="utf-8")
        if into.with_name(PAGE).exists():
            _write_page(into)
    if as_json:
        typer.echo(found.text(), nl=False)
        return
    shown = terminal.console_for_tables(WIDTH)
    for each in tables.tables(found):
        shown.print()
        shown.print(each.for_terminal())
        for note in each.notes:
            shown.print(note, soft_wrap=True)


def _measure(size: str, repeats: int, with_losses: bool, out: Path) -> SitesFile:
    """All of it; raises NoNetwork or ChildFailed. Progress goes to standard error."""
    progress = terminal.console(stderr=True)

    def say(text: str) -> None:
        progress.print(text, soft_wrap=True)

    if reason := machine.complaint() or why_not():  # before anything is written
        raise NoNetwork(reason)
    logs = out.resolve() / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"cannot write to {out} ({error.strerror}); name another folder with --out")
    end_like_an_error_on_signals()
    with (
        sites_network(logs, sites=SITES, workers=WORKERS, wan=WAN, delay_s=DELAY_S) as network,
        ProcessPool(logs, 0) as pool,
    ):
        place = Place(network, pool)
        return SitesFile(
            shlex.join([*COMMAND.split(), *sys.argv[1:]]),
            machine.describe(),
            tuple(_rounds(place, size, repeats, say)),
            tuple(losses(place, TINY, say)) if with_losses else (),
            tuple(_trained(logs, say)) if with_losses else (),
        )


def _rounds(place: Place, size: str, repeats: int, say: Callable[[str], None]) -> list[Measurement]:
    found = []
    for pair in PAIRS:
        for way in WAYS:
            each = rounds(place, size, pair, way, repeats)
            say(f"{size} {each.pair}, {tables.NAMES[way]}: {each.median_s:.3g} s")
            found.append(each)
    return found


def _trained(logs: Path, say: Callable[[str], None]) -> Iterator[Trained]:
    for each in training(logs):
        say(f"{each.way}, seed {each.seed}: loss {each.loss:.3f}, {each.pushes} pushes of a site")
        yield each


def _write_page(into: Path) -> None:
    try:
        tables.write(read(into), into.with_name(PAGE))
    except BadFile as error:
        refuse(str(error))
