"""`diloco-worker doctor`: is all well between here and the broker, and what would a round take?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from diloco_protocol.clients.command_line import (
    KeyFile,
    ServerArgument,
    ServerOption,
    fail,
    server_of,
)
from diloco_protocol.errors import UsageError
from diloco_protocol.quantities import parse_parameters
from diloco_worker.doctor import report
from diloco_worker.doctor.examination import Fault, Findings, Wrong, examine
from diloco_worker.doctor.planning import plan

WIDE = 400  # columns


def _size(text: str) -> int:
    try:
        return parse_parameters(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def doctor(
    *,
    address: ServerArgument = None,
    server: ServerOption = None,
    keys: KeyFile = None,
    parameters: Annotated[
        int | None,
        typer.Option(metavar="N", parser=_size, help="Of a model: 124M. Default: the run's."),
    ] = None,
    step_time: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=1e-9, help="Of one optimizer step on this machine."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long to wait for each answer.")
    ] = 5.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, for programs.")
    ] = False,
) -> None:
    """Look at what stands between this machine and its broker, and tell what a round would take.

    Name, port, keys, versions, clocks, round trips, bandwidth. Nothing is joined. A few seconds.

    Exit codes: 0 all is well. Else of the first thing that is wrong: 2 usage, 3 unknown name, 4 port,
    5 not a broker, 6 no key, 7 key file, 8 wrong key, 9 unwanted key, 10 version, 11 no answer, 12
    clocks, 13 line.
    """
    try:
        findings = examine(server_of(address, server), keys, timeout)
    except UsageError as error:
        if not as_json:
            fail("diloco-worker", error)
        findings = Findings(address or server or "", [Wrong(Fault.USAGE, str(error))])
    found = report.estimate(findings, parameters, step_time)
    planned = plan(findings, found)
    if as_json:
        of_all = None if planned is None else asdict(planned)
        typer.echo(json.dumps(report.as_plain(findings, found, of_all)))
    else:
        # Names are printed as they are. Without a terminal no width is known: a
        # sentence a line.
        console = Console(markup=False, emoji=False, highlight=False)
        if not console.is_terminal:
            console.width = WIDE
        sentence = None if planned is None else planned.sentence
        console.print(report.as_text(findings, found, sentence))
    raise typer.Exit(report.exit_code(findings))
