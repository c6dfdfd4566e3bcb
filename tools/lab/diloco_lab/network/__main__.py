"""`python -m diloco_lab.network`: measure runs over slow lines, at one switch or at several sites."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.bench.sizes import SIZES
from diloco_lab.driver import machine
from diloco_lab.driver.experiment import Experiment
from diloco_lab.driver.options import choice, words
from diloco_lab.driver.records import BadFile, read_document, text_of
from diloco_lab.driver.tables import Table, rate_of, show, write_page
from diloco_lab.network.lan import grid, measuring
from diloco_lab.network.lan import tables as lan_tables
from diloco_lab.network.lan.grid import KINDS, LINES, PAIRS, Choice, LanFile, Part
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
from diloco_lab.network.sites.tables import WAYS, Measurement, SitesFile, Trained
from diloco_lab.network.sites.training import training
from diloco_tools import terminal
from diloco_tools.processes import ChildFailed

COMMAND = "python -m diloco_lab.network"
SKIPPED = 3  # exit code where no such network can be made
SIZES_OF_LAN = tuple(dict.fromkeys(part.size for part in (*grid.everything(), *grid.quick())))
WORKERS_OF_LAN = tuple(str(n) for n in sorted({part.workers for part in grid.everything()}))
SITE_PAIRS = (("bf16", "fp32"), ("int4z", "int4z"))
TINY = "0.4M"  # what a loss does shows as well with a small model

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)

Quick = Annotated[bool, typer.Option("--quick", help="A minute or two: small models, fewer runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Out = Annotated[Path, typer.Option(help="Folder for the results and logs.")]
Into = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Put the results into this file, too, in the place of older ones, and into the page "
        "beside it, if it is there.",
    ),
]
SkipIsSuccess = Annotated[
    bool,
    typer.Option("--skip-is-success", help="End with 0 instead of 3 where it cannot be measured."),
]
OnlyPage = Annotated[
    bool, typer.Option("--page", help="Measure nothing; write the page from what --into has.")
]


class Kept(NamedTuple):
    """Where the results of one of the two commands are kept, and how they are shown.

    Attributes:
        kind: of the document in the file of results.
        tables: of such a file, for the terminal.
        blocks: the same, for its page.
    """

    name: str
    kind: type[Any]
    tables: Callable[[Any], list[Table]]
    blocks: Callable[[Any], dict[str, str]]


LAN = Kept("lan", LanFile, lambda of: lan_tables.tables(of.measurements), lan_tables.blocks)
SITES_FILE = Kept("sites", SitesFile, site_tables.tables, site_tables.blocks)


class OverLines(Experiment):
    """One start of either command; a file that cannot be written is refused before it measures."""

    def __init__(self, kept: Kept, out: Path, into: Path | None, *, only_page: bool) -> None:
        interrupted = "its processes and networks are gone"
        super().__init__(f"{COMMAND} {kept.name}", out, interrupted=interrupted, is_quiet=True)
        self._kept, self._into = kept, into
        if into is None:
            if only_page:
                file = f"--into tools/lab/{kept.name}.json"
                self.refuse(f"--page takes the file of measurements: {file}")
        elif not os.access(into if into.exists() else into.parent, os.W_OK):
            self.refuse(f"--into {into} cannot be written; name a file in a folder that exists")
        self._older = self._read() if into is not None and into.exists() else None
        if only_page:
            self._write_page()
            raise typer.Exit

    @contextlib.contextmanager
    def measuring(self, *, skip_is_success: bool) -> Iterator[Path]:
        """The folder for logs; the command ends with a sentence where no network can be made."""
        try:
            if reason := machine.complaint() or why_not():  # before anything is written
                raise NoNetwork(reason)
            with self.folder():
                yield self.logs()
        except NoNetwork as error:
            code = 0 if skip_is_success else SKIPPED
            terminal.fail(self.command, f"skipped: {error}", code)

    def publish(self, found: Any, *, as_json: bool) -> None:
        """Write the results and the page, and print them."""
        text = text_of(found)
        (self.out / f"{self._kept.name}.json").write_text(text, encoding="utf-8")
        if self._into is not None:
            whole = found if self._older is None else found.with_older(self._older)
            self._into.write_text(text_of(whole), encoding="utf-8")
            if self._page.exists():
                self._write_page()
        if as_json:
            typer.echo(text, nl=False)
        else:
            show(self._kept.tables(found), self.shown)

    @property
    def _page(self) -> Path:
        """Beside the file of results."""
        assert self._into is not None
        return self._into.with_name(f"{self._kept.name.upper()}.md")

    def _read(self) -> Any:
        assert self._into is not None
        try:
            return read_document(self._into, self._kept.kind)
        except BadFile as error:
            self.refuse(str(error))

    def _write_page(self) -> None:
        try:
            write_page(self._page, self._kept.blocks(self._read()))
        except BadFile as error:
            self.refuse(str(error))


@app.callback()
def commands() -> None:
    """Measure runs over slow lines, in network namespaces of this machine.

    Takes root and Linux. Nothing of it is visible in your own network, and all of
    it is removed at the end. Where it cannot be made, the exit code is 3.
    """


@app.command()
def lan(  # noqa: PLR0913, PLR0917  each is an option of the command
    quick: Quick = False,
    kinds: Annotated[str, choice("--kinds", KINDS, "Only these, with commas")] = "",
    parameters: Annotated[str, choice("--parameters", SIZES_OF_LAN, "Only these models")] = "",
    codecs: Annotated[str, choice("--codecs", map("/".join, PAIRS), "Only these")] = "",
    lines: Annotated[str, choice("--lines", LINES, "Only these lines")] = "",
    workers: Annotated[
        str, choice("--workers", WORKERS_OF_LAN, "Only these numbers of workers")
    ] = "",
    as_json: AsJson = False,
    out: Out = Path("runs/lan"),
    into: Into = None,
    skip_is_success: SkipIsSuccess = False,
    only_page: OnlyPage = False,
) -> None:
    """Measure syncs over lines of a limited rate: under 20 minutes on two cores."""
    experiment = OverLines(LAN, out, into, only_page=only_page)
    asked = Choice(
        words(kinds),
        words(parameters),
        [pair for pair in PAIRS if "/".join(pair) in words(codecs)],
        words(lines),
        [int(each) for each in words(workers)],
    )
    parts = grid.chosen(grid.quick() if quick else grid.everything(), asked)
    if not parts:
        experiment.refuse("nothing is measured with all of these options; leave some of them out")
    members = one_switch(max(part.workers for part in parts))
    with experiment.measuring(skip_is_success=skip_is_success) as logs:
        about = machine.describe() | {"nice": os.nice(0)}
        with network(members, measuring.SET_UP) as made, ProcessPool(logs, 0) as pool:
            found = _parts(experiment, Place(made, pool), parts)
    experiment.tick("")
    if found:
        file = LanFile(experiment.started_as, experiment.at, about, tuple(found))
        experiment.publish(file, as_json=as_json)
    if experiment.has_failed or not found:
        raise typer.Exit(1)


@app.command()
def sites(  # noqa: PLR0917  each is an option of the command
    quick: Quick = False,
    parameters: Annotated[str, choice("--parameters", SIZES, "The model", several=False)] = "10M",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each configuration.")] = 3,
    as_json: AsJson = False,
    out: Out = Path("runs/sites"),
    into: Into = None,
    skip_is_success: SkipIsSuccess = False,
    only_page: OnlyPage = False,
) -> None:
    """Measure rounds of two sites behind a slow line: a star, and a relay at each site.

    Then lose a relay, a line and the hub, and see how long each is missed: some
    minutes on two cores. With --quick only rounds, and of a tiny model.
    """
    experiment = OverLines(SITES_FILE, out, into, only_page=only_page)
    size, repeats = (TINY, 1) if quick else (parameters, repeats)
    members = several_sites(SITES, WORKERS)
    with (
        experiment.measuring(skip_is_success=skip_is_success) as logs,
        network(members, folder=logs, delay_s=DELAY_S) as made,
        ProcessPool(logs, 0) as pool,
    ):
        made.set_wan(WAN)
        place = Place(made, pool)
        found = SitesFile(
            experiment.started_as,
            machine.describe(),
            tuple(_rounds(experiment, place, size, repeats)),
            () if quick else tuple(losses(place, TINY, experiment.say)),
            () if quick else tuple(_trained(experiment, logs)),
        )
    experiment.publish(found, as_json=as_json)


def _parts(experiment: Experiment, place: Place, parts: Iterable[Part]) -> list[grid.Measurement]:
    """What could be measured, with a line for each measurement."""
    pool = place.pool

    def part_of(part: Part) -> Iterator[grid.Measurement]:
        yield from measuring.measure(place, part)
        for sentence in [*pool.skipped, *_left_out(part)]:
            experiment.say(f"            {sentence}")
        pool.skipped.clear()

    try:
        return experiment.measure(
            {part.name: partial(part_of, part) for part in parts},
            failed=lambda _: pool.start_afresh(),
            failures=(ChildFailed, NoNetwork),
            each=lambda found: experiment.tick(f"    {_in_short(found)}"),
        )
    except BaseException:  # leaving the run over a slow link would take too long
        for child in pool.all:
            child.kill()
        raise


def _left_out(part: Part) -> Iterator[str]:
    if part.kind == "round":
        for line, seconds in grid.too_long(part).items():
            yield f"{rate_of(line)} is left out: a sync would take {seconds:.0f} s"


def _in_short(of: grid.Measurement) -> str:
    hidden = f", {of.hidden:.0%} hidden" if of.hidden is not None else ""
    share = of.line_seconds / of.median_s if of.kind == "round" else 0.0
    shared = f", {share:.0%} of the line" if share else ""
    return f"{rate_of(of.broker_bits_per_s)}: {of.median_s:.3g} s{shared}{hidden}"


def _rounds(experiment: Experiment, place: Place, size: str, repeats: int) -> Iterator[Measurement]:
    for pair in SITE_PAIRS:
        for way in WAYS:
            found = rounds(place, size, pair, way, repeats)
            name = site_tables.NAMES[way]
            experiment.tick(f"{size} {found.pair}, {name}: {found.median_s:.3g} s")
            yield found


def _trained(experiment: Experiment, logs: Path) -> Iterator[Trained]:
    for each in training(logs):
        pushes = f"{each.pushes} pushes of a site"
        experiment.tick(f"{each.way}, seed {each.seed}: loss {each.loss:.3f}, {pushes}")
        yield each


if __name__ == "__main__":
    app(prog_name=COMMAND)
