"""`python -m diloco_lab.network`: measure runs over slow lines, at one switch or at several sites."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.driver import machine
from diloco_lab.driver.experiment import Experiment
from diloco_lab.driver.records import BadFile, read_document, text_of
from diloco_lab.driver.tables import Table, rate_of, show, write_page
from diloco_lab.network.lan import grid, measuring
from diloco_lab.network.lan import tables as lan_tables
from diloco_lab.network.lan.grid import LanFile, Measurement, Part
from diloco_lab.network.namespaces import (
    NoNetwork,
    Place,
    network,
    one_switch,
    several_sites,
    why_not,
)
from diloco_lab.network.sites import tables as site_tables
from diloco_lab.network.sites.losing import losses
from diloco_lab.network.sites.rounds import DELAY_S, SITES, WAN, WORKERS, rounds
from diloco_lab.network.sites.tables import SitesFile
from diloco_tools import terminal
from diloco_tools.processes import ChildFailed

T = TypeVar("T")
COMMAND = "python -m diloco_lab.network"
SKIPPED = 3  # exit code if no such network can be made
SITE_PAIRS = (("bf16", "fp32"), ("int4z", "int4z"))
SIZE, REPEATS = "10M", 3  # of rounds over sites
TINY = "0.4M"  # for losses, whose effect does not depend on the size
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


def _lan(experiment: Experiment, logs: Path, quick: bool) -> LanFile | None:
    """Syncs over lines of a limited rate; None if nothing could be measured."""
    parts = grid.quick() if quick else grid.everything()
    members = one_switch(max(part.workers for part in parts))
    about = machine.describe() | {"nice": os.nice(0)}
    with network(members, measuring.SET_UP) as made, ProcessPool(logs, 0) as pool:
        place = Place(made, pool)

        def part_of(part: Part) -> Iterator[Measurement]:
            yield from measuring.measure(place, part)
            if part.kind == "round":
                for line, seconds in grid.too_long(part).items():
                    pool.skipped.append(f"{rate_of(line)}: left out, a sync takes {seconds:.0f} s")
            for sentence in pool.skipped:
                experiment.say(f"            {sentence}")
            pool.skipped.clear()

        try:
            found = experiment.measure(
                {part.name: partial(part_of, part) for part in parts},
                failed=lambda _: pool.start_afresh(),
                failures=(ChildFailed, NoNetwork),
                each=lambda of: experiment.tick(
                    f"    {rate_of(of.broker_bits_per_s)}: {of.median_s:.3g} s"
                ),
            )
        except BaseException:  # leaving the run in order over a slow line would take too long
            for child in pool.all:
                child.kill()
            raise
    return LanFile(experiment.started_as, experiment.at, about, tuple(found)) if found else None


def _sites(experiment: Experiment, logs: Path, quick: bool) -> SitesFile:
    """Rounds of two sites: a star, and a relay at each; then losses of a relay, a line and the hub."""
    size, repeats = (TINY, 1) if quick else (SIZE, REPEATS)
    with (
        network(several_sites(SITES, WORKERS), folder=logs, delay_s=DELAY_S) as made,
        ProcessPool(logs, 0) as pool,
    ):
        made.set_wan(WAN)
        place = Place(made, pool)

        def measure(parts: Mapping[str, Callable[[], Iterator[T]]]) -> tuple[T, ...]:
            return tuple(
                experiment.measure(
                    parts,
                    failed=lambda _: pool.start_afresh(),
                    each=lambda of: experiment.tick(f"    {of}"),
                )
            )

        of_rounds = {
            f"rounds, {'/'.join(pair)}": partial(rounds, place, size, pair, repeats)
            for pair in SITE_PAIRS
        }
        return SitesFile(
            experiment.started_as,
            machine.describe(),
            measure(of_rounds),
            () if quick else measure({"losses": partial(losses, place, TINY)}),
        )


@dataclass(frozen=True)
class Command:
    """The measurement, the type of its file of results, and the tables of these."""

    measure: Callable[[Experiment, Path, bool], Any]
    kind: type[Any]
    tables: Callable[[Any], list[Table]]
    blocks: Callable[[Any], dict[str, str]]


COMMANDS = {
    "lan": Command(_lan, LanFile, lambda of: lan_tables.tables(of.measurements), lan_tables.blocks),
    "sites": Command(_sites, SitesFile, site_tables.tables, site_tables.blocks),
}


@app.command()
def main(  # noqa: PLR0917  each is an option
    what: Annotated[str, typer.Argument(help="lan: one switch. sites: two sites behind a WAN.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute or two: small models, fewer runs.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results and logs; default: runs/WHAT.")
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Put the results into this file, too.",
        ),
    ] = None,
    skip_is_success: Annotated[
        bool,
        typer.Option(
            "--skip-is-success", help="End with 0 instead of 3 if nothing can be measured here."
        ),
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure nothing; put the tables of what --into has into this page.",
        ),
    ] = None,
) -> None:
    """Measure runs over slow lines, in network namespaces of this machine: under 20 minutes.

    Needs root and Linux. It does not change your own network, and everything is
    removed at the end. If it cannot be made, the exit code is 3.
    """
    interrupted = "its processes and networks are gone"
    folder = Path("runs") / what if out is None else out
    experiment = Experiment(f"{COMMAND} {what}", folder, interrupted=interrupted)
    if (command := COMMANDS.get(what)) is None:
        experiment.refuse(f"unknown {what!r}; choose from {', '.join(COMMANDS)}")
    if into is None:
        if page is not None:
            experiment.refuse(f"--page takes the file of results: --into tools/lab/{what}.json")
    elif not os.access(into if into.exists() else into.parent, os.W_OK):
        experiment.refuse(f"--into {into} cannot be written; name a file in a folder that exists")
    if page is None:
        text = _measured(experiment, command, quick, skip_is_success)
        (experiment.out / f"{what}.json").write_text(text, encoding="utf-8")
        if into is not None:
            into.write_text(text, encoding="utf-8")
    elif into is not None:
        try:
            write_page(page, command.blocks(read_document(into, command.kind)), what)
        except BadFile as error:
            experiment.refuse(str(error))
    experiment.end((), (), ())


def _measured(experiment: Experiment, command: Command, quick: bool, skip_is_success: bool) -> str:
    """Measure and print; the file of results."""
    try:
        if reason := machine.complaint() or why_not():  # before anything is written
            raise NoNetwork(reason)
        with experiment.folder():
            found = command.measure(experiment, experiment.logs(), quick)
    except NoNetwork as error:
        code = 0 if skip_is_success else SKIPPED
        terminal.fail(experiment.command, f"skipped: {error}", code)
    if found is None:
        raise typer.Exit(1)
    show(command.tables(found), experiment.shown)
    return text_of(found)


if __name__ == "__main__":
    app(prog_name=COMMAND)
