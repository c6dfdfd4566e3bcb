"""Commands that ask a running broker for something, from `status` to `stop-all`.

Exit codes: 0 it was done, 1 the broker refused or (`status`) the run is degraded, 2 wrong usage or no
broker there, 130 given up.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any, NoReturn, cast

import typer

from diloco_broker.cli.config_options import DECLARED, parameter
from diloco_broker.cli.failures import fail
from diloco_broker.cli.status_text import as_text
from diloco_broker.core.operations.settings import SETTINGS
from diloco_protocol.clients import Operator, find_keys
from diloco_protocol.clients.command_line import (
    WRONG_USAGE,
    KeyFile,
    ServerArgument,
    ServerOption,
    server_of,
    with_options,
)
from diloco_protocol.errors import Unreachable, UsageError
from diloco_protocol.feed import read_snapshot
from diloco_protocol.messages import Result
from diloco_protocol.monitor.verdict import verdict_on
from diloco_protocol.quantities import parse_duration
from diloco_protocol.roles import Role

REFUSED, IS_DEGRADED, GIVEN_UP = 1, 1, 130
ASK_AGAIN_S = 0.5
# Settings that end the run.
ENDS = {"max_rounds", "token_budget", "max_time"}

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for the answer.")]
Wait = Annotated[
    float, typer.Option(metavar="SECONDS", help="How long to wait for the workers' replies.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask whether you are sure.")]

# What an option that is set while the run goes on needs to have said besides.
_ALSO = {"sync_every": " From each worker's next cycle on.", "quorum": " 0: wait for all."}
_ALSO |= dict.fromkeys(("max_rounds", "token_budget", "max_time"), " 0: no such end.")


def _control(command: Callable[..., dict[str, Any]]) -> Callable[..., None]:
    """Make a command of what returns its arguments: the broker is asked to do what it is named after."""
    action = command.__name__.rstrip("_")

    @with_options(signature(command, eval_str=True).parameters.values())
    def ask(
        address: ServerArgument = None,
        server: ServerOption = None,
        as_json: AsJson = False,
        timeout: Timeout = 5.0,
        keys: KeyFile = None,
        **options: Any,
    ) -> None:
        where = _server(address, server, as_json)
        arguments = command(**options)
        _finish(_ask(where, timeout, action, as_json, keys, **arguments), as_json)

    ask.__name__, ask.__doc__ = command.__name__, command.__doc__
    return cast(Callable[..., None], ask)


def status(
    address: ServerArgument = None,
    server: ServerOption = None,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
    keys: KeyFile = None,
) -> None:
    """Show how a running broker is doing. For a display that keeps running: diloco-top.

    Exit code 1 while the run is DEGRADED, as diloco-top has it.
    """
    result = _ask(_server(address, server, as_json), timeout, "status", as_json, keys)
    if not result.ok:
        _finish(result, as_json)
        return
    is_standby = (
        "hears_hub" in result.data
    )  # it has no run to judge, only how it stands with its hub
    if as_json:
        typer.echo(json.dumps(result.data))
    elif is_standby:
        typer.echo(result.text)
    else:
        is_seen = sys.stdout.isatty()
        typer.echo(as_text(result.data, get_terminal_size().lines - 2 if is_seen else None))
    if not is_standby and verdict_on(read_snapshot(result.data)).word == "degraded":
        raise typer.Exit(IS_DEGRADED)


@_control
def save() -> dict[str, Any]:
    """Write a checkpoint now."""
    return {}


@_control
def kick(
    worker: Annotated[str, typer.Argument(help="Its id, as diloco-broker status shows it.")],
    yes: Yes = False,
) -> dict[str, Any]:
    """Remove a worker from the run: the others no longer wait for it, it is told."""
    _sure(yes, f"Remove {worker} from the run? What it has not sent whole is lost.")
    return {"worker": worker}


@with_options(parameter(name, None, DECLARED[name].help + _ALSO.get(name, "")) for name in SETTINGS)
def set_(  # noqa: PLR0917  each is an option
    address: ServerArgument = None,
    server: ServerOption = None,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
    keys: KeyFile = None,
    yes: Yes = False,
    **settings: Any,
) -> None:
    """Change settings of the run from the next version on. All of them, or none if one is wrong.

    An end of the run that it has reached already ends it with the open round, so that needs --yes.
    """
    where = _server(address, server, as_json)
    arguments = {name: value for name, value in settings.items() if value is not None}
    if not arguments:
        options = ", ".join("--" + name.replace("_", "-") for name in SETTINGS)
        _fail(f"There is nothing to set; give one or more of {options}.")
    if not yes and ENDS & arguments.keys():
        status = _ask(where, timeout, "status", as_json, keys)
        reached = reached_end(arguments, status.data) if status.ok else None
        if reached is not None:
            _sure(yes, f"{reached} End the run?", as_json)
    _finish(_ask(where, timeout, "set", as_json, keys, **arguments), as_json)


def reached_end(settings: Mapping[str, Any], status: Mapping[str, Any]) -> str | None:
    """A sentence if one of these settings ends the run with its open round; else None.

    Args:
        settings: by name, as `set` is given them; 0 means no such end.
        status: the broker's snapshot.
    """
    end, totals = status.get("end") or {}, status.get("totals") or {}
    open_ = status.get("round") or {}
    rounds = open_.get("number", 0)
    has_begun = rounds or open_.get("expected") or open_.get("arrived")
    tokens = end.get("tokens", totals.get("tokens", 0))
    seconds = end.get("seconds", totals.get("open_s", 0))
    limit = settings.get("max_rounds", 0)
    if has_begun and 0 < limit <= rounds + 1:
        when = "now" if limit <= rounds else "with the open round"
        made = f"{rounds} round{'s'[: rounds != 1]}"
        return f"The run has made {made}: --max-rounds {limit} ends it {when}."
    if 0 < settings.get("token_budget", 0) <= tokens:
        return (
            f"The run has trained on {tokens} tokens: --token-budget {settings['token_budget']} ends "
            "it now."
        )
    with contextlib.suppress(ValueError):  # the broker refuses it
        if 0 < parse_duration(settings.get("max_time", "")) <= seconds:
            return f"The run has trained for {seconds} s: --max-time {settings['max_time']} ends it now."
    return None


@_control
def pause() -> dict[str, Any]:
    """Close no more rounds: workers train to their next boundary and wait there."""
    return {}


@_control
def resume() -> dict[str, Any]:
    """Go on after pause."""
    return {}


@_control
def shutdown(
    restarting: Annotated[
        bool,
        typer.Option(
            "--restarting",
            help="The broker will be started again: workers train on and come back to it.",
        ),
    ] = False,
    yes: Yes = False,
) -> dict[str, Any]:
    """End the run: the broker finishes a closing round, saves, and tells its workers to end."""
    if restarting:
        _sure(yes, "Stop the broker? Its workers train on alone until it is started again.")
    else:
        _sure(yes, "End the run? Its workers are told to stop. (--restarting: they train on.)")
    return {"restarting": True} if restarting else {}


def save_all(
    address: ServerArgument = None,
    server: ServerOption = None,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
    keys: KeyFile = None,
    *,
    wait: Wait = 60.0,
) -> None:
    """Ask each worker to save, and show who has."""
    _order("save_all", _server(address, server, as_json), as_json, timeout, keys, wait=wait)


def stop_all(
    address: ServerArgument = None,
    server: ServerOption = None,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
    keys: KeyFile = None,
    *,
    wait: Wait = 60.0,
    yes: Yes = False,
) -> None:
    """Ask each worker to leave once its work in flight is back, and show who has. The broker goes on."""
    _sure(yes, "Stop all workers? The broker goes on; they may join again.")
    _order("stop_all", _server(address, server, as_json), as_json, timeout, keys, wait=wait)


def _order(
    action: str, address: str, as_json: bool, timeout: float, keys: Path | None, *, wait: float
) -> None:
    """Give it, then ask now and then how things stand, until all have answered."""
    until = time.monotonic() + wait
    result = _ask(address, timeout, action, as_json, keys)
    try:
        while result.ok and result.data.get("waiting") and time.monotonic() < until:
            time.sleep(ASK_AGAIN_S)
            result = _ask(address, timeout, action, as_json, keys, order=result.data["order"])
    except KeyboardInterrupt:
        raise typer.Exit(GIVEN_UP) from None
    _finish(result, as_json)
    if result.data.get("waiting"):
        raise typer.Exit(REFUSED)


def promote(
    address: ServerArgument = None,
    server: ServerOption = None,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
    keys: KeyFile = None,
    *,
    force: Annotated[
        bool,
        typer.Option("--force", help="At once: you know that the other is gone, and stays so."),
    ] = False,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for the takeover.")
    ] = 90.0,
    yes: Yes = False,
) -> None:
    """Let a standby take over from its hub; or let a hub go on alone, whose standby is gone for good.

    A hub that is there finishes its round, saves, and steps down. Without a hub
    most of its workers have to be at the standby; --force takes your word instead.
    Of several addresses it is the hub that is asked: give one.
    """
    if force:
        _sure(yes, "Take your word? If the other broker is there after all, two have the run.")
    until, arguments = time.monotonic() + wait, {"force": True} if force else {}
    where = _server(address, server, as_json)
    result = _ask(where, timeout, "promote", as_json, keys, **arguments)
    while result.ok and result.data.get("is_over") is False and time.monotonic() < until:
        time.sleep(ASK_AGAIN_S)
        # While the standby becomes a broker nobody answers for a moment.
        result = _ask(where, max(timeout, 30.0), "promote", as_json, keys)
    _finish(result, as_json)
    if result.data.get("is_over") is False:
        raise typer.Exit(REFUSED)


COMMANDS: tuple[Callable[..., None], ...] = (
    status,
    save,
    kick,
    set_,
    pause,
    resume,
    shutdown,
    save_all,
    stop_all,
    promote,
)


def _server(argument: str | None, option: str | None, as_json: bool) -> str:
    try:
        return server_of(argument, option)
    except UsageError as error:
        _fail(str(error), as_json)


def _ask(
    address: str, timeout: float, action: str, as_json: bool, keys: Path | None, **arguments: Any
) -> Result:
    try:
        key = find_keys(keys, Role.OPERATOR)
        with Operator(address, timeout=timeout, keys=key) as operator:
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


def _sure(yes: bool, question: str, as_json: bool = False) -> None:
    """Ask on the terminal; where there is none --yes is needed."""
    if yes:
        return
    if not sys.stdin.isatty():
        _fail(f"{question} There is no terminal to ask on; give --yes to confirm.", as_json)
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
        raise typer.Exit(WRONG_USAGE)
    fail(sentence)
