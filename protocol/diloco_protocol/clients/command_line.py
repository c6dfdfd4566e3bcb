"""What all commands of this project share: `--version`, and which option names which address.

`--server` is the broker's control address and `--feed` that of its feed in every command. An argument
without an option is the address that the command connects to first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from diloco_protocol.addresses import DEFAULT_CONTROL_ADDRESS, DEFAULT_FEED_ADDRESS
from diloco_protocol.errors import UsageError

DISTRIBUTION = "diloco-broker"
SERVER_VARIABLE, FEED_VARIABLE = "DILOCO_SERVER", "DILOCO_FEED"

ServerArgument = Annotated[
    str | None, typer.Argument(metavar="[ADDR]", show_default=False, help="The same as --server.")
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        "--address",
        metavar="ADDR",
        show_default=False,
        help="Control address that diloco-broker serve printed: HOST, HOST:PORT or file:///PATH. Of "
        "several, separated by commas, the broker that has the run is asked. Default: "
        f"{SERVER_VARIABLE}, else {DEFAULT_CONTROL_ADDRESS}.",
    ),
]
FeedArgument = Annotated[
    str | None, typer.Argument(metavar="[ADDR]", show_default=False, help="The same as --feed.")
]
FeedOption = Annotated[
    str | None,
    typer.Option(
        "--feed",
        metavar="ADDR",
        show_default=False,
        help="Feed address that diloco-broker serve printed: HOST, HOST:PORT or file:///PATH. Default: "
        f"{FEED_VARIABLE}, else {DEFAULT_FEED_ADDRESS}.",
    ),
]


def server_of(argument: str | None, option: str | None) -> str:
    """The control address that a command line gives; raises UsageError where it gives two."""
    return _address("--server", argument, option, SERVER_VARIABLE, DEFAULT_CONTROL_ADDRESS)


def feed_of(argument: str | None, option: str | None) -> str:
    """The feed address that a command line gives; raises UsageError where it gives two."""
    return _address("--feed", argument, option, FEED_VARIABLE, DEFAULT_FEED_ADDRESS)


def _address(
    name: str, argument: str | None, option: str | None, variable: str, default: str
) -> str:
    if None not in (argument, option) and argument != option:
        raise UsageError(
            f"Both {argument} and {name} {option} are given, and mean the same; leave one out."
        )
    given = option if argument is None else argument
    return os.environ.get(variable, "").strip() or default if given is None else given


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"{DISTRIBUTION} {version(DISTRIBUTION)}")
        raise typer.Exit


_VERSION = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
]


def with_version(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--version` to a command, or to the callback of a group of commands."""

    @wraps(command)
    def run(*arguments: Any, version: bool = False, **options: Any) -> Any:
        return command(*arguments, **options)

    found = signature(command, eval_str=True)
    option = Parameter("version", Parameter.KEYWORD_ONLY, default=False, annotation=_VERSION)
    together = [*found.parameters.values(), option]
    run.__signature__ = found.replace(parameters=together)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in together}
    return run
