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
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any, NoReturn, cast

import typer

from diloco_broker.cli.config_options import DECLARED, parameter
from diloco_broker.cli.failures import fail
from diloco_broker.cli.status_text import as_text
from diloco_broker.config.broker_config import SETTINGS
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


@dataclass(frozen=True)
class Asked:
    """The broker that a command asks, and how it says what came of it."""

    address: str
    timeout: float
    as_json: bool
    keys: Path | None

    def ask(self, action: str, **arguments: Any) -> Result:
        """The answer to an action; ends the process where none comes within `timeout` seconds."""
        try:
            return self._ask(action, **arguments)
        except Unreachable as error:
            _fail(str(error), self.as_json)

    def ask_again(self, action: str) -> Result | None:
        """The answer to an action; None where none comes within `timeout` seconds."""
        try:
            return self._ask(action)
        except Unreachable:
            return None

    def _ask(self, action: str, **arguments: Any) -> Result:
        try:
            key = find_keys(self.keys, Role.OPERATOR)
            with Operator(self.address, timeout=self.timeout, keys=key) as operator:
                return operator.ask(action, **arguments)
        except UsageError as error:
            _fail(str(error), self.as_json)
        except KeyboardInterrupt:
            raise typer.Exit(GIVEN_UP) from None

    def do(self, action: str, **arguments: Any) -> None:
        """Have an action carried out, and say what came of it."""
        self.finish(self.ask(action, **arguments))

    def finish(self, result: Result) -> None:
        """Say what came of it; ends the process where the broker refused."""
        text = result.text if result.ok else f"diloco-broker: {result.text}"
        if self.as_json:
            typer.echo(json.dumps({"ok": result.ok, "text": result.text, **result.data}))
        else:
            typer.echo(text, err=not result.ok)
        if not result.ok:
            raise typer.Exit(REFUSED)

    def sure(self, yes: bool, question: str) -> None:
        """Ask on the terminal; where there is none --yes is needed."""
        if yes:
            return
        if not sys.stdin.isatty():
            _fail(f"{question} No terminal to ask on; give --yes to confirm.", self.as_json)
        try:
            is_sure = typer.confirm(question)
        except (typer.Abort, KeyboardInterrupt):
            is_sure = False
        if not is_sure:
            typer.echo("Nothing was done.")
            raise typer.Exit(GIVEN_UP)


def _asking(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function of the broker that is asked: with the options that say which."""
    own = [
        each
        for each in signature(command, eval_str=True).parameters.values()
        if each.name != "broker" and each.kind is not Parameter.VAR_KEYWORD
    ]

    @with_options(own)
    def ask(
        address: ServerArgument = None,
        server: ServerOption = None,
        as_json: AsJson = False,
        timeout: Timeout = 5.0,
        keys: KeyFile = None,
        **options: Any,
    ) -> None:
        try:
            where = server_of(address, server)
        except UsageError as error:
            _fail(str(error), as_json)
        command(Asked(where, timeout, as_json, keys), **options)

    ask.__name__, ask.__doc__ = command.__name__, command.__doc__
    return cast(Callable[..., None], ask)


@_asking
def status(broker: Asked) -> None:
    """Show how a running broker is doing. For a display that keeps running: diloco-top.

    Exit code 1 while the run is DEGRADED, as diloco-top has it.
    """
    result = broker.ask("status")
    if not result.ok:
        broker.finish(result)
        return
    # A standby has no run to judge, only how it stands with its hub.
    is_standby = "hears_hub" in result.data
    if broker.as_json:
        typer.echo(json.dumps(result.data))
    elif is_standby:
        typer.echo(result.text)
    else:
        is_seen = sys.stdout.isatty()
        typer.echo(as_text(result.data, get_terminal_size().lines - 2 if is_seen else None))
    if not is_standby and verdict_on(read_snapshot(result.data)).word == "degraded":
        raise typer.Exit(IS_DEGRADED)


@_asking
def save(broker: Asked) -> None:
    """Write a checkpoint now."""
    broker.do("save")


@_asking
def kick(
    broker: Asked,
    worker: Annotated[str, typer.Argument(help="Its id, as diloco-broker status shows it.")],
    yes: Yes = False,
) -> None:
    """Remove a worker from the run: the others no longer wait for it, it is told."""
    broker.sure(yes, f"Remove {worker} from the run? What it has not sent whole is lost.")
    broker.do("kick", worker=worker)


@_asking
@with_options(parameter(name, None, DECLARED[name].help + _ALSO.get(name, "")) for name in SETTINGS)
def set_(broker: Asked, yes: Yes = False, **settings: Any) -> None:
    """Change settings of the run from the next version on. All of them, or none if one is wrong.

    An end of the run that it has reached already ends it with the open round, so that needs --yes.
    """
    arguments = {name: value for name, value in settings.items() if value is not None}
    if not arguments:
        options = ", ".join("--" + name.replace("_", "-") for name in SETTINGS)
        _fail(f"There is nothing to set; give one or more of {options}.")
    if not yes and ENDS & arguments.keys():
        status = broker.ask("status")
        reached = reached_end(arguments, status.data) if status.ok else None
        if reached is not None:
            broker.sure(yes, f"{reached} End the run?")
    broker.do("set", **arguments)


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


@_asking
def pause(broker: Asked) -> None:
    """Close no more rounds: workers train to their next boundary and wait there."""
    broker.do("pause")


@_asking
def resume(broker: Asked) -> None:
    """Go on after pause."""
    broker.do("resume")


@_asking
def shutdown(
    broker: Asked,
    restarting: Annotated[
        bool,
        typer.Option(
            "--restarting",
            help="The broker will be started again: workers train on and come back to it.",
        ),
    ] = False,
    yes: Yes = False,
) -> None:
    """End the run: the broker finishes a closing round, saves, and stops its workers."""
    if restarting:
        broker.sure(yes, "Stop the broker? Its workers train on alone until it is started again.")
        broker.do("shutdown", restarting=True)
    else:
        broker.sure(
            yes, "End the run? Its workers are told to stop. (--restarting: they train on.)"
        )
        broker.do("shutdown")


@_asking
def save_all(broker: Asked, wait: Wait = 60.0) -> None:
    """Ask each worker to save, and show who has."""
    _order(broker, "save_all", wait)


@_asking
def stop_all(broker: Asked, wait: Wait = 60.0, yes: Yes = False) -> None:
    """Ask each worker to leave once its work in flight is back, and show who has. The broker goes on."""
    broker.sure(yes, "Stop all workers? The broker goes on; they may join again.")
    _order(broker, "stop_all", wait)


def _order(broker: Asked, action: str, wait: float) -> None:
    """Give it, then ask now and then how things stand, until all have answered."""
    until = time.monotonic() + wait
    result = broker.ask(action)
    try:
        while result.ok and result.data.get("waiting") and time.monotonic() < until:
            time.sleep(ASK_AGAIN_S)
            result = broker.ask(action, order=result.data["order"])
    except KeyboardInterrupt:
        raise typer.Exit(GIVEN_UP) from None
    broker.finish(result)
    if result.data.get("waiting"):
        raise typer.Exit(REFUSED)


@_asking
def promote(
    broker: Asked,
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
        broker.sure(
            yes, "Take your word? If the other broker is there after all, two have the run."
        )
    until, arguments = time.monotonic() + wait, {"force": True} if force else {}
    result = broker.ask("promote", **arguments)
    while result.ok and result.data.get("is_over") is False and time.monotonic() < until:
        time.sleep(ASK_AGAIN_S)
        # While the standby becomes a broker it does not answer for a moment.
        result = broker.ask_again("promote") or result
    broker.finish(result)
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


def _fail(sentence: str, as_json: bool = False) -> NoReturn:
    if as_json:
        typer.echo(json.dumps({"ok": False, "text": sentence}))
        raise typer.Exit(WRONG_USAGE)
    fail(sentence)
