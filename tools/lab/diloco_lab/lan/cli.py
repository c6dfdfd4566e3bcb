"""`make lan`: what a sync takes over lines of 1 Gb/s, 100 and 50 Mb/s, and what is left to training."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from diloco_lab.bench import machine
from diloco_lab.bench.limited_network import NoNetwork, limited_network, why_not
from diloco_lab.bench.options import words
from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.lan import grid, page
from diloco_lab.lan.grid import LINES, Choice, Part
from diloco_lab.lan.measuring import SET_UP, Place, measure
from diloco_lab.lan.records import KINDS, PAIRS, BadFile, LanFile, Measurement, read
from diloco_lab.lan.tables import tables
from diloco_tools import terminal
from diloco_tools.processes import ChildFailed, end_like_an_error_on_signals

COMMAND = "python -m diloco_lab.lan"
SKIPPED = 3  # exit code where there can be no such network
RAW_BYTES = 1 << 20  # of raw TCP, which is not measured here
WIDTH = 130  # of the tables where there is no terminal
PAGE = "LAN.md"  # beside the file of measurements
SIZES = tuple(dict.fromkeys(part.size for part in (*grid.everything(), *grid.quick())))
WORKERS = tuple(str(n) for n in sorted({part.workers for part in grid.everything()}))

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
refuse = partial(terminal.fail, COMMAND, code=2)


def _some(what: str, known: Iterable[str], name: str) -> Any:
    """An option of words with commas between them, each of which is known; none stand for all."""
    known = list(known)

    def check(text: str) -> str:
        for each in words(text):
            if each not in known:
                refuse(f"{name} {each!r} is unknown here; choose from {', '.join(known)}")
        return text

    return typer.Option(name, help=f"{what}: {', '.join(known)}.", callback=check)


@app.command()
def lan(  # noqa: PLR0913, PLR0917  each is an option of the command
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute or two: 10M parameters, one of each kind.")
    ] = False,
    kinds: Annotated[str, _some("Only these, with commas", KINDS, "--kinds")] = "",
    parameters: Annotated[str, _some("Only these models", SIZES, "--parameters")] = "",
    codecs: Annotated[str, _some("Only these", map("/".join, PAIRS), "--codecs")] = "",
    lines: Annotated[str, _some("Only these lines", LINES, "--lines")] = "",
    workers: Annotated[str, _some("Only these numbers of workers", WORKERS, "--workers")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results and logs.")] = Path("runs/lan"),
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Put the results into this file of measurements, too, in the place of older ones, and "
            f"into {PAGE} beside it, if it is there.",
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
    """Measure syncs over lines of a limited rate: broker and workers in namespaces.

    Takes root and Linux, and under 20 minutes on two cores. Nothing of it can be
    seen from your own network, and all of it is removed at the end. Where it
    cannot be made the reason is said and the exit code is 3.
    """
    older = _read(into)
    if only_page:
        if older is None:
            refuse("--page takes the file of measurements: --into tools/lab/lan.json")
        _write_page(older, into)
        return
    shown = terminal.console_for_tables(WIDTH)
    choice = Choice(
        words(kinds),
        words(parameters),
        [pair for pair in PAIRS if "/".join(pair) in words(codecs)],
        words(lines),
        [int(each) for each in words(workers)],
    )
    parts = grid.chosen(grid.quick() if quick else grid.everything(), choice)
    if not parts:
        refuse("nothing is measured with all of these options; leave some of them out")
    try:
        found, has_failed = _measure(parts, out)
    except NoNetwork as error:
        skipped = 0 if skip_is_success else SKIPPED
        terminal.fail(COMMAND, f"skipped: {error}", skipped)
    if not found.measurements:
        raise typer.Exit(1)
    (out / "lan.json").write_text(found.text(), encoding="utf-8")
    if into is not None:
        whole = found.with_older(older.measurements if older else ())
        into.write_text(whole.text(), encoding="utf-8")
        if into.with_name(PAGE).exists():
            _write_page(read(into), into)
    if as_json:
        typer.echo(found.text(), nl=False)
    else:
        _show(found, shown)
    if has_failed:
        raise typer.Exit(1)


def _measure(parts: Sequence[Part], out: Path) -> tuple[LanFile, bool]:
    """All of the parts, and whether one has failed; progress goes to standard error.

    Raises:
        NoNetwork: nothing can be measured here.
    """
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
    at, began = datetime.now().astimezone(), time.monotonic()
    about = machine.describe() | {"nice": os.nice(0)}
    members = max(part.workers for part in parts)
    try:
        with (
            limited_network(SET_UP, [SET_UP] * members) as network,
            ProcessPool(logs, RAW_BYTES) as pool,
        ):
            found, has_failed = _all_of(Place(network, pool), parts, say)
    except KeyboardInterrupt:
        terminal.fail(COMMAND, "interrupted; its processes and networks are gone", 130)
    say(f"{time.monotonic() - began:4.0f} s")
    return LanFile(
        shlex.join([*COMMAND.split(), *sys.argv[1:]]),
        at.isoformat(timespec="seconds"),
        about,
        tuple(found),
    ), has_failed


def _all_of(
    place: Place, parts: Sequence[Part], say: Callable[[str], None]
) -> tuple[list[Measurement], bool]:
    """What could be measured, and whether something could not for an error."""
    found: list[Measurement] = []
    has_failed, began = False, time.monotonic()
    try:
        for number, part in enumerate(parts, start=1):
            say(f"{time.monotonic() - began:4.0f} s  {number}/{len(parts)}  {part.name}")
            try:
                for each in measure(place, part):
                    found.append(each)
                    say(f"{time.monotonic() - began:4.0f} s      {_in_short(each)}")
            except (ChildFailed, NoNetwork) as error:
                # What was measured before, and what comes, is worth as much without it.
                say(f"{COMMAND}: {error}")
                has_failed = True
                place.pool.start_afresh()
            _say_left_out(part, place.pool, say)
    except BaseException:  # leaving the run over a slow link would take too long
        for child in place.pool.all:
            child.kill()
        raise
    return found, has_failed


def _in_short(of: Measurement) -> str:
    hidden = f", {of.hidden:.0%} hidden" if of.hidden is not None else ""
    share = of.line_seconds / of.median_s if of.kind == "round" else 0.0
    shared = f", {share:.0%} of the line" if share else ""
    return f"{grid.rate_of(of.broker_bits_per_s)}: {of.median_s:.3g} s{shared}{hidden}"


def _say_left_out(part: Part, pool: ProcessPool, say: Callable[[str], None]) -> None:
    for sentence in pool.skipped:
        say(f"            {sentence}")
    pool.skipped.clear()
    if part.kind == "round":
        for line, seconds in grid.too_long(part).items():
            say(f"            {grid.rate_of(line)} is left out: a sync would take {seconds:.0f} s")


def _read(into: Path | None) -> LanFile | None:
    """What is there; a file that could not be written is refused before anything is measured."""
    if into is not None and not os.access(into if into.exists() else into.parent, os.W_OK):
        refuse(f"--into {into} cannot be written; name a file in a folder that is there")
    try:
        return read(into) if into is not None and into.exists() else None
    except BadFile as error:
        refuse(str(error))


def _write_page(found: LanFile, into: Path | None) -> None:
    assert into is not None
    try:
        page.write(found, tables(found.measurements), into.with_name(PAGE))
    except BadFile as error:
        refuse(str(error))


def _show(found: LanFile, shown: Console) -> None:
    for each in tables(found.measurements):
        shown.print()
        shown.print(each.for_terminal())
        for note in each.notes:
            shown.print(note, soft_wrap=True)
