"""Shared code of all commands: appearance, failures, and options for the address of a broker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from importlib.metadata import version
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from diloco_protocol.addresses import (
    CONTROL_PORT,
    DEFAULT_CONTROL_ADDRESS,
    DEFAULT_FEED_ADDRESS,
    FEED_PORT,
    address_or_path,
    several,
    with_scheme,
)
from diloco_protocol.clients.address_file import ADDRESS, check_address, resolved
from diloco_protocol.clients.help_page import Command, Group
from diloco_protocol.clients.keys import VARIABLE, Keys
from diloco_protocol.clients.operator import Operator
from diloco_protocol.errors import DilocoError, Unreachable, UsageError

DISTRIBUTION = "diloco-broker"
SERVER_VARIABLE, FEED_VARIABLE = "DILOCO_SERVER", "DILOCO_FEED"
WRONG_USAGE = 2  # exit code, also of most failures to start

KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        metavar="FILE",
        envvar=VARIABLE,
        help="Key file, if the broker requires keys; diloco-broker keygen makes it.",
    ),
]


def server_option(
    *aliases: str, otherwise: str = f", else {DEFAULT_CONTROL_ADDRESS}", **settings: Any
) -> Any:
    """The option for the broker's address; `otherwise` ends the sentence about its default."""
    usual: dict[str, Any] = {
        "metavar": "ADDR",
        "show_default": False,
        "help": "Address of the broker: HOST, HOST:PORT or file:///PATH of the file that serve "
        "--address-file writes. Of several, separated by commas, the one that has the run is used. "
        f"Default: {SERVER_VARIABLE}{otherwise}.",
    }
    return typer.Option("--server", "--address", *aliases, **usual | settings)


ServerArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="ADDR", show_default=False, help="Address of the broker; same as --server."
    ),
]
ServerOption = Annotated[str | None, server_option()]
# Options of displays, which read the broker's feed and can find it from the control address.
FeedArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="ADDR",
        show_default=False,
        help="Address of the broker or of its feed; same as --server or --feed.",
    ),
]
FeedOption = Annotated[
    str | None,
    typer.Option(
        "--feed",
        metavar="ADDR",
        show_default=False,
        help=f"Address of the broker's feed, which it prints at the start. Default: {FEED_VARIABLE}, "
        f"else the feed of the broker at --server, else {DEFAULT_FEED_ADDRESS}.",
    ),
]
FeedServerOption = Annotated[str | None, server_option("--control", otherwise="")]


def server_of(
    argument: str | None, option: str | None, default: str | None = DEFAULT_CONTROL_ADDRESS
) -> str:
    """The control address from the command line or the environment.

    Raises:
        UsageError: two addresses are given, none is given and `default` is None, or it is invalid.
    """
    given = _one_of({"ADDR": argument, "--server": option})
    name, text = given or _variable(SERVER_VARIABLE) or ("ADDR", default)
    if text is None:
        raise UsageError(
            f"The broker's address is missing; give --server or {SERVER_VARIABLE}: {ADDRESS}."
        )
    if text == "local":
        raise UsageError(f"{name} is local, which means an outer optimizer without a broker.")
    return check_address(name, text)


def server_or_path(
    argument: str | None, option: str | None, default: Path | None = None
) -> tuple[str | None, Path]:
    """The address of a broker, or the path, of a command that accepts either as its argument.

    Raises:
        UsageError: as for `server_of`.
    """
    if argument is not None and (Path(argument).exists() or address_or_path(argument) is None):
        if option is not None:
            raise _two(argument, "--server", option)
        return None, Path(argument)
    if default is not None and not (argument or option or _variable(SERVER_VARIABLE)):
        return None, default
    return with_scheme(server_of(argument, option, default=None)), Path()


def feed_of(
    argument: str | None, feed: str | None, server: str | None, keys: Keys | None = None
) -> str:
    """The address of the feed for a display, from the command line or the environment.

    If only the control address is given, it is returned instead.

    Raises:
        UsageError: two addresses are given, one is invalid, or a file has none.
    """
    given = _one_of({"ADDR": argument, "--feed": feed})
    if given is None and server is None:
        given = _variable(FEED_VARIABLE)
    if given is None and (server is not None or _variable(SERVER_VARIABLE)):
        text, port = server_of(None, server), CONTROL_PORT
    else:
        text, port = check_address(*given) if given else DEFAULT_FEED_ADDRESS, FEED_PORT
    places = several(text)
    if len(places) > 1:
        with suppress(Unreachable), Operator(text, keys=keys) as operator:
            return operator.find()
        text = places[0]
    return resolved(with_scheme(text, port), line=1)


def _one_of(given: dict[str, str | None]) -> tuple[str, str] | None:
    """The name and value of the given one; None if none is given."""
    found = [(name, value) for name, value in given.items() if value is not None]
    if len({value for _, value in found}) > 1:
        raise _two(found[0][1], *found[1])
    return found[0] if found else None


def _two(argument: str, name: str, option: str) -> UsageError:
    return UsageError(f"Both {argument} and {name} {option} are given; omit one of them.")


def _variable(name: str) -> tuple[str, str] | None:
    text = os.environ.get(name, "").strip()
    return (name, text) if text else None


def fail(command: str, sentence: object, code: int = WRONG_USAGE) -> NoReturn:
    """Print an error to standard error, and exit with this code."""
    typer.echo(f"{command}: {sentence}", err=True)
    raise typer.Exit(code) from None


@contextmanager
def failing_in_a_sentence(command: str) -> Iterator[None]:
    """A context in which a DilocoError exits the process with its message."""
    try:
        yield
    except DilocoError as error:
        fail(command, error)


def with_options(options: Iterable[Parameter]) -> Callable[[Any], Any]:
    """Replace the `**options` of a command by these options, before its own parameters."""

    def decorate(command: Any) -> Any:
        together = list(options)
        for each in signature(command, eval_str=True).parameters.values():
            if each.kind is not Parameter.VAR_KEYWORD:
                together.append(each.replace(kind=Parameter.KEYWORD_ONLY))
        _declare(command, together)
        return command

    return decorate


def _declare(command: Any, parameters: list[Parameter]) -> None:
    """Declare these parameters as the signature that typer reads."""
    command.__signature__ = Signature(parameters)
    command.__annotations__ = {each.name: each.annotation for each in parameters}


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"{DISTRIBUTION} {version(DISTRIBUTION)}")
        raise typer.Exit


_VERSION = Parameter(
    "version",
    Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ],
)


def with_version(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--version` to a command, or to the callback of a group of commands."""

    @wraps(command)
    def run(*arguments: Any, version: bool = False, **options: Any) -> Any:
        return command(*arguments, **options)

    _declare(run, [*signature(command, eval_str=True).parameters.values(), _VERSION])
    return run


class App(typer.Typer):
    """A program or group of commands; each command has `--version` and the common help page."""

    def __init__(self, **settings: Any) -> None:
        plain = {"cls": Group, "rich_markup_mode": None, "pretty_exceptions_enable": False}
        super().__init__(**plain | settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        register = super().command(name, **{"cls": Command} | settings)
        return lambda command: register(with_version(command))

    def callback(self, **settings: Any) -> Callable[..., Any]:
        register = super().callback(**settings)
        return lambda command: register(with_version(command))
