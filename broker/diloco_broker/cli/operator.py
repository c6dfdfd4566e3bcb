"""Commands that send a control action to a running broker, from `status` to `promote`.

Exit codes: 0 success, 1 the broker refused or (`status`) the run is degraded, 2 wrong usage or no reply,
130 cancelled.
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

from diloco_broker.cli import fail
from diloco_broker.cli.config_options import DECLARED, AsJson, as_number, parameter
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

Timeout = Annotated[
    float, typer.Option(metavar="SECONDS", help="Timeout of the broker's reply, seconds.")
]
Wait = Annotated[
    float, typer.Option(metavar="SECONDS", help="Timeout of the workers' replies, seconds.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

# Additional help of options that change a running run.
_ALSO = {"sync_every": " Takes effect with each worker's next cycle.", "quorum": " 0: all workers."}
_ALSO |= dict.fromkeys(("max_rounds", "token_budget", "max_time"), " 0: no limit.")


@dataclass(frozen=True)
class Asked:
    """The broker that a command addresses, and how the result is printed."""

    address: str
    timeout: float
    as_json: bool
    keys: Path | None

    def ask(self, action: str, **arguments: Any) -> Result:
        """Send an action and return the reply; exits if none arrives within `timeout` seconds."""
        try:
            return self._ask(action, **arguments)
        except Unreachable as error:
            _fail(str(error), self.as_json)

    def ask_again(self, action: str) -> Result | None:
        """Send an action and return the reply; None if none arrives within `timeout` seconds."""
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
        """Send an action, and print the result."""
        self.finish(self.ask(action, **arguments))

    def finish(self, result: Result) -> None:
        """Print a result; exits if the broker refused."""
        text = result.text if result.ok else f"diloco-broker: {result.text}"
        if self.as_json:
            typer.echo(json.dumps({"ok": result.ok, "text": result.text, **result.data}))
        else:
            typer.echo(text, err=not result.ok)
        if not result.ok:
            raise typer.Exit(REFUSED)

    def sure(self, yes: bool, question: str) -> None:
        """Ask for confirmation; without a terminal --yes is required."""
        if yes:
            return
        if not sys.stdin.isatty():
            _fail(
                f"{question} Standard input is not a terminal; give --yes to confirm.", self.as_json
            )
        try:
            is_sure = typer.confirm(question)
        except (typer.Abort, KeyboardInterrupt):
            is_sure = False
        if not is_sure:
            typer.echo("Cancelled.")
            raise typer.Exit(GIVEN_UP)


def _asking(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function of `Asked`: add the options that select the broker."""
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
    """Show the status of a running broker once; diloco-top shows it continuously.

    Exit code 1 if the run is DEGRADED, by the same rules as diloco-top.
    """
    result = broker.ask("status")
    if not result.ok:
        broker.finish(result)
        return
    # A standby has no run to judge, only its connection to the hub.
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
    worker: Annotated[str, typer.Argument(help="Worker id, as shown by diloco-broker status.")],
    yes: Yes = False,
) -> None:
    """Remove a worker from the run and notify it; rounds no longer wait for it."""
    broker.sure(yes, f"Remove {worker} from the run? Its incomplete push is lost.")
    broker.do("kick", worker=worker)


@_asking
@with_options(parameter(name, None, DECLARED[name].help + _ALSO.get(name, "")) for name in SETTINGS)
def set_(broker: Asked, yes: Yes = False, **settings: Any) -> None:
    """Change settings of the run from the next version on: all of them, or none if one is invalid.

    A limit that the run has reached already ends it with the open round, and needs confirmation.
    """
    arguments = {name: value for name, value in settings.items() if value is not None}
    if not arguments:
        options = ", ".join("--" + name.replace("_", "-") for name in SETTINGS)
        _fail(f"Nothing to set; give one or more of {options}.")
    if not yes and ENDS & arguments.keys():
        status = broker.ask("status")
        reached = reached_end(arguments, status.data) if status.ok else None
        if reached is not None:
            broker.sure(yes, f"{reached} End the run?")
    if "grace" in arguments:
        arguments["grace"] = as_number(arguments["grace"])
    broker.do("set", **arguments)


def reached_end(settings: Mapping[str, Any], status: Mapping[str, Any]) -> str | None:
    """A sentence if one of these settings ends the run with its open round; else None.

    Args:
        settings: by name, as passed to `set`; 0 means no limit.
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
    with contextlib.suppress(ValueError):  # the broker rejects it
        if 0 < parse_duration(settings.get("max_time", "")) <= seconds:
            return f"The run has trained for {seconds} s: --max-time {settings['max_time']} ends it now."
    return None


@_asking
def pause(broker: Asked) -> None:
    """Stop closing rounds: workers train to their next boundary and wait there."""
    broker.do("pause")


@_asking
def resume(broker: Asked) -> None:
    """Continue after pause."""
    broker.do("resume")


@_asking
def shutdown(
    broker: Asked,
    restarting: Annotated[
        bool,
        typer.Option(
            "--restarting",
            help="Stop the broker for a restart: workers continue training and reconnect.",
        ),
    ] = False,
    yes: Yes = False,
) -> None:
    """End the run: the broker finishes a closing round, saves, and stops its workers."""
    if restarting:
        broker.sure(yes, "Stop the broker? Its workers train alone until it is restarted.")
        broker.do("shutdown", restarting=True)
    else:
        broker.sure(
            yes, "End the run? Its workers stop. (With --restarting they continue training.)"
        )
        broker.do("shutdown")


@_asking
def save_all(broker: Asked, wait: Wait = 60.0) -> None:
    """Ask each worker to save, and show which have."""
    _order(broker, "save_all", wait)


@_asking
def stop_all(broker: Asked, wait: Wait = 60.0, yes: Yes = False) -> None:
    """Ask each worker to leave after its pushes in flight, and show which have. The broker continues."""
    broker.sure(yes, "Stop all workers? The broker keeps running; they may rejoin.")
    _order(broker, "stop_all", wait)


def _order(broker: Asked, action: str, wait: float) -> None:
    """Send a command to all workers, and poll until all have replied."""
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
        bool, typer.Option("--force", help="Do not wait: the other broker is down and stays down.")
    ] = False,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="Timeout of the takeover, seconds.")
    ] = 90.0,
    yes: Yes = False,
) -> None:
    """Let a standby take over from its hub, or a hub continue whose standby is down for good.

    A running hub finishes its round, saves, and steps down. If the hub is down,
    most of its workers must be at the standby, unless --force is given.
    Give one address: of several, the hub is addressed.
    """
    if force:
        broker.sure(
            yes, "Force the takeover? If the other broker is still running, both have the run."
        )
    until, arguments = time.monotonic() + wait, {"force": True} if force else {}
    result = broker.ask("promote", **arguments)
    while result.ok and result.data.get("is_over") is False and time.monotonic() < until:
        time.sleep(ASK_AGAIN_S)
        # The standby does not reply while it becomes a broker.
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
