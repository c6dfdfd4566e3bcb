"""`diloco-worker doctor`: checks the connection from this machine to the broker."""

from __future__ import annotations

import json
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
        typer.Option(
            metavar="N",
            parser=_size,
            help="Size of the model to plan for: 124M. Default: the run's.",
        ),
    ] = None,
    step_time: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=1e-9, help="Duration of one optimizer step, to plan with."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long to wait for each answer.")
    ] = 5.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, for programs.")
    ] = False,
) -> None:
    """Check the connection from this machine to its broker, and measure it.

    Name, port, keys, versions, clocks, round trips, bandwidth. Joins nothing. Takes a few seconds.
    Ends with the diloco-plan command for this run over the measured link.

    Exit codes: 0 without a fault. Else of the first fault: 2 usage, 3 unknown name, 4 port,
    5 not a broker, 6 no key, 7 key file, 8 wrong key, 9 unwanted key, 10 version, 11 no answer, 12
    clocks, 13 line.
    """
    try:
        findings = examine(server_of(address, server), keys, timeout)
    except UsageError as error:
        if not as_json:
            fail("diloco-worker", error)
        findings = Findings(address or server or "", [Wrong(Fault.USAGE, str(error))])
    command = report.plan_command(findings, parameters, step_time)
    if as_json:
        typer.echo(json.dumps(report.as_plain(findings, command)))
    else:
        console = Console(markup=False, emoji=False, highlight=False)
        if not console.is_terminal:  # its width is unknown: one line each
            console.width = WIDE
        console.print(report.as_text(findings, command))
    raise typer.Exit(report.exit_code(findings))
