"""Commands that ask a running broker for something: status, save, kick, set, pause, resume, shutdown.

Exit codes: 0 it was done, 1 the broker refused, 2 wrong usage or no broker there, 130 given up.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from shutil import get_terminal_size
from typing import Annotated, Any, NoReturn

import typer

from diloco_broker.cli.status_text import as_text
from diloco_protocol.addresses import DEFAULT_CONTROL_ADDRESS
from diloco_protocol.clients.operator import Operator
from diloco_protocol.errors import Unreachable, UsageError
from diloco_protocol.messages import Result

REFUSED, NO_BROKER, GIVEN_UP = 1, 2, 130

Address = Annotated[
    str,
    typer.Option(
        "--address",
        metavar="ADDR",
        envvar="DILOCO_SERVER",
        help="Control address that diloco-broker serve printed.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for the answer.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask whether you are sure.")]


def status(
    address: Address = DEFAULT_CONTROL_ADDRESS, as_json: AsJson = False, timeout: Timeout = 5.0
) -> None:
    """Show how a running broker fares. For a screen that goes on: diloco-top."""
    result = _ask(address, timeout, "status", as_json)
    if not result.ok:
        _finish(result, as_json)
    elif as_json:
        typer.echo(json.dumps(result.data))
    else:
        is_seen = sys.stdout.isatty()
        typer.echo(as_text(result.data, get_terminal_size().lines - 2 if is_seen else None))


def save(
    address: Address = DEFAULT_CONTROL_ADDRESS, as_json: AsJson = False, timeout: Timeout = 5.0
) -> None:
    """Write a checkpoint now."""
    _finish(_ask(address, timeout, "save", as_json), as_json)


def kick(
    worker: Annotated[str, typer.Argument(help="Its id, as diloco-broker status shows it.")],
    address: Address = DEFAULT_CONTROL_ADDRESS,
    yes: Yes = False,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
) -> None:
    """Remove a worker from the run: the others no longer wait for it, it is told."""
    _sure(yes, f"Remove {worker} from the run? What it has not sent whole is lost.")
    _finish(_ask(address, timeout, "kick", as_json, worker=worker), as_json)


def set_(
    outer_lr: Annotated[
        float | None, typer.Option(help="Learning rate of the outer optimizer.")
    ] = None,
    outer_momentum: Annotated[
        float | None, typer.Option(help="Momentum of the outer optimizer.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Workers that round one waits for; in async mode, how many are planned."),
    ] = None,
    min_workers: Annotated[
        int | None, typer.Option(help="No round closes with fewer contributions.")
    ] = None,
    sync_every: Annotated[
        int | None,
        typer.Option(help="H, inner steps between two pushes; from each worker's next cycle on."),
    ] = None,
    quorum: Annotated[
        int | None,
        typer.Option(help="Close a round --grace seconds after so many are in; 0: wait for all."),
    ] = None,
    grace: Annotated[
        float | None, typer.Option(help="Seconds to wait for the rest after the quorum.")
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="Rounds between two checkpoints.")] = None,
    address: Address = DEFAULT_CONTROL_ADDRESS,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
) -> None:
    """Change settings of the run from the next version on. All of them, or none if one is wrong."""
    values: dict[str, float | int | None] = {
        "outer_lr": outer_lr,
        "outer_momentum": outer_momentum,
        "workers": workers,
        "min_workers": min_workers,
        "sync_every": sync_every,
        "quorum": quorum,
        "grace": grace,
        "save_every": save_every,
    }
    arguments: dict[str, float | int | None] = {
        name: value for name, value in values.items() if value is not None
    }
    if not arguments:
        options = ", ".join("--" + name.replace("_", "-") for name in values)
        _fail(f"There is nothing to set; give one or more of {options}.")
    _finish(_ask(address, timeout, "set", as_json, **arguments), as_json)


def pause(
    address: Address = DEFAULT_CONTROL_ADDRESS, as_json: AsJson = False, timeout: Timeout = 5.0
) -> None:
    """Close no more rounds: workers train to their next boundary and wait there."""
    _finish(_ask(address, timeout, "pause", as_json), as_json)


def resume(
    address: Address = DEFAULT_CONTROL_ADDRESS, as_json: AsJson = False, timeout: Timeout = 5.0
) -> None:
    """Go on after pause."""
    _finish(_ask(address, timeout, "resume", as_json), as_json)


def shutdown(
    restarting: Annotated[
        bool,
        typer.Option(
            "--restarting",
            help="The broker will be started again: workers train on and come back to it.",
        ),
    ] = False,
    address: Address = DEFAULT_CONTROL_ADDRESS,
    yes: Yes = False,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
) -> None:
    """End the run: the broker finishes a closing round, saves, and tells its workers to end."""
    if restarting:
        _sure(yes, "Stop the broker? Its workers train on alone until it is started again.")
    else:
        _sure(yes, "End the run? Its workers are told to stop. (--restarting: they train on.)")
    arguments = {"restarting": True} if restarting else {}
    _finish(_ask(address, timeout, "shutdown", as_json, **arguments), as_json)


COMMANDS: tuple[Callable[..., None], ...] = (status, save, kick, set_, pause, resume, shutdown)


def _ask(address: str, timeout: float, action: str, as_json: bool, **arguments: Any) -> Result:
    try:
        with Operator(address, timeout=timeout) as operator:
            return operator.ask(action, **arguments)
    except (UsageError, Unreachable) as error:
        _fail(str(error), as_json)
    except KeyboardInterrupt:
        raise typer.Exit(GIVEN_UP) from None


def _finish(result: Result, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"ok": result.ok, "text": result.text, **result.data}))
    else:
        typer.echo(result.text if result.ok else f"diloco-broker: {result.text}", err=not result.ok)
    if not result.ok:
        raise typer.Exit(REFUSED)


def _sure(yes: bool, question: str) -> None:
    """Ask, where there is somebody to ask; a script says --yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        _fail("Nobody can be asked whether this is meant; give --yes.")
    try:
        is_sure = typer.confirm(question)
    except (typer.Abort, KeyboardInterrupt):
        is_sure = False
    if not is_sure:
        typer.echo("Nothing was done.")
        raise typer.Exit(GIVEN_UP)


def _fail(sentence: str, as_json: bool = False) -> NoReturn:
    if as_json:
        typer.echo(json.dumps({"ok": False, "text": sentence}))
    else:
        typer.echo(f"diloco-broker: {sentence}", err=True)
    raise typer.Exit(NO_BROKER)
