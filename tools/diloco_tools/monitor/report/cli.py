"""The command diloco-report."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from diloco_protocol.clients.command_line import App
from diloco_protocol.feed import FeedError, json_safe
from diloco_protocol.records import to_plain
from diloco_tools.monitor.feed.history_lines import history_of
from diloco_tools.monitor.report.digest import read_run
from diloco_tools.monitor.report.page import page_of
from diloco_tools.terminal import fail

COMMAND = "diloco-report"
PAGE = "report.html"
NOT_WRITTEN = 1

app = App()


@app.command(
    epilog="Exit codes: 0 the report was made, 1 it cannot be written, 2 no history was found."
)
def report(
    *,
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="The run's folder (--save-dir of diloco-broker serve), or its history.jsonl.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"The page; default: {PAGE} beside the history."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the facts as one JSON object instead of writing a page."
        ),
    ] = False,
) -> None:
    """Make one HTML page about a run: loss, rounds, workers, bytes, events, settings.

    The page needs no network and no other file. If the run continues, the page describes it as of the
    last line.
    """
    if as_json and out is not None:
        fail(COMMAND, "--json and --out exclude each other")
    try:
        facts = read_run(run)
    except FeedError as error:
        fail(COMMAND, error)
    if as_json:
        print(json.dumps(json_safe(to_plain(facts, with_none=True)), allow_nan=False))
        return
    page = out or history_of(run).with_name(PAGE)
    try:
        _write(page, page_of(facts))
    except OSError as error:
        why = error.strerror or error
        fail(COMMAND, f"{page} cannot be written ({why}): use another --out FILE", NOT_WRITTEN)
    typer.echo(f"report {page}")


def _write(path: Path, text: str) -> None:
    """Write the file atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
