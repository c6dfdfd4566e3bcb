"""Output for people through Rich, without markup and emoji codes: styles come from `Text` alone.

Names of folders, workers and extras contain square brackets and colons, which Rich would interpret.
"""

import shlex
import shutil
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from diloco_protocol.addresses import is_loopback
from diloco_protocol.clients import Keys, find_keys
from diloco_protocol.clients.command_line import KeyFile as KeysOption
from diloco_protocol.clients.command_line import fail
from diloco_protocol.errors import UsageError
from diloco_protocol.roles import Role

__all__ = ["KeysOption", "console", "console_for_tables", "fail", "installed", "keys_of"]

HostOption = Annotated[
    str, typer.Option(help="Address to listen on; any but loopback needs --insecure.")
]


InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Listen on an address that other machines reach, which can then read all that is shown. "
        "Nothing is encrypted, not even the dashboard's token; prefer an SSH tunnel.",
    ),
]
ReplayOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Show a past run: the history.jsonl of its save folder."),
]


def check_host(host: str, port: int, *, insecure: bool) -> None:
    """Raise UsageError for an address that other machines reach, without --insecure."""
    if not is_loopback(host) and not insecure:
        raise UsageError(
            f"other machines reach {host!a}, and nothing is encrypted: use an SSH tunnel "
            f"(ssh -L {port}:127.0.0.1:{port} HOST), or add --insecure"
        )


def listen(command: str, host: str, port: int) -> socket.socket:
    """A listening socket, on a free port for 0; exits with a sentence if there is none."""
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, dualstack_ipv6=is_dual)
    except (OSError, UnicodeError) as error:
        # `create_server` appends the address to the words of the system.
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        fail(
            command,
            f"cannot listen on {host!a} port {port} ({reason}): use an address of this machine with "
            "--host and a free port with --port, or --port 0",
        )


def keys_of(given: Path | None, *, steers: bool) -> Keys | None:
    """The key of a display; from a folder an operator's if it also steers. Raises UsageError."""
    first, second = Role.OPERATOR, Role.MONITOR
    order = (first, second) if steers else (second, first)
    return find_keys(given, *order, Role.WORKER)


def console(**options: Any) -> Console:
    """A console, with these options of Rich, that prints each string verbatim."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def console_for_tables(width: int) -> Console:
    """A console with the terminal's width, or with this one if the output is not a terminal."""
    shown = console()
    return shown if shown.is_terminal else console(width=width)


def installed(command: str) -> str:
    """A command of this package as a shell finds it: its path if the environment is not active."""
    if shutil.which(command):
        return command
    path, here = Path(sys.executable).with_name(command), Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
